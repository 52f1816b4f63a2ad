// Makes the description of a cache that kernels read (KvPages, KvScales) from the cache that a caller passes (KvCache).
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

constexpr std::int64_t kMostInInt = INT32_MAX;  // kernels count within a block or a token by int

// activations: the type that "auto" stands for.
KvLayer make_kv_layer(const KvCache& kv, DType activations);
KvType kv_type_named(const std::string& name);

// For a cache that is written: throws if one of `others` lies in it. (Keys and values may take turns in one piece of
// memory.)
void expect_writable(const KvCache& kv, std::initializer_list<const TensorRef*> others);

}  // namespace octavo::cuda
