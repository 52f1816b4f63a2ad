// From what callers pass to what kernels read.
#pragma once

#include "api.h"
#include "common/pages.cuh"

namespace octavo::cuda {

struct KvLayer {
    KvPages pages;
    KvScales scales;
    KvType type;
    int num_blocks, num_heads, head_dim;
    bool contiguous;  // the dimensions of keys and of values
};

// activations: the type that "auto" stands for.
KvLayer make_kv_layer(const KvCache& kv, DType activations);
KvType kv_type_named(const std::string& name);

}  // namespace octavo::cuda
