// The attention kernels by name: attention.cu launches them, and the files of inst/ instantiate them.
#pragma once

#include "attention.cuh"
#include "common/kv_cache.h"

namespace octavo::cuda {

// A kernel and the shape it is launched with.
struct KernelChoice {
    void (*kernel)(AttentionParams);
    int threads;
    std::size_t shared_bytes;
    int rows;  // of a tile
};

// groups: columns of 8 rows, 1 or (not with 256 dimensions) 2.
KernelChoice decode_mma_f16_64(KvType kv, int groups);
KernelChoice decode_mma_f16_128(KvType kv, int groups);
KernelChoice decode_mma_f16_256(KvType kv, int groups);
KernelChoice decode_mma_bf16_64(KvType kv, int groups);
KernelChoice decode_mma_bf16_128(KvType kv, int groups);
KernelChoice decode_mma_bf16_256(KvType kv, int groups);

KernelChoice prefill_mma_f16_64(KvType kv);
KernelChoice prefill_mma_f16_128(KvType kv);
KernelChoice prefill_mma_f16_256(KvType kv);
KernelChoice prefill_mma_bf16_64(KvType kv);
KernelChoice prefill_mma_bf16_128(KvType kv);
KernelChoice prefill_mma_bf16_256(KvType kv);

KernelChoice attention_simt(DType dtype, KvType kv, int head_dim);

// Checks the arguments that all attention kernels share and writes them to `p`; the plan is not among them.
KvLayer make_params(AttentionParams& p, const TensorRef& out, const TensorRef& queries, const KvCache& kv,
                    const TensorRef& tables, const TensorRef& lens, const Attention& attention);

}  // namespace octavo::cuda
