// Where keys (or values) lie in blocks: one description for all layouts.
//
//   hnd    [num_blocks, kv_head, 2, block_size, head_dim]
//   nhd    [num_blocks, 2, block_size, kv_head, head_dim]
//   xpack  keys [num_blocks, kv_head, head_dim / x, block_size, x], values [num_blocks, kv_head, head_dim, block_size]
#pragma once

#include <cstdint>

#include "arch/simt.h"

namespace octavo::cuda {

// The type of the elements of blocks. kSame: the type of the activations.
enum class KvType : std::uint8_t { kSame, kE4M3, kE5M2, kInt8 };

struct Pages {
    void* data;
    std::int64_t block, head, token;  // strides in elements
    std::int64_t outer;               // from one run of `run` dimensions to the next
    std::int64_t inner;               // from one dimension of a run to the next
    int run;

    __host__ __device__ std::int64_t offset(std::int64_t block_id, int head_id, int slot) const {
        return block_id * block + head_id * head + slot * token;
    }
    __host__ __device__ std::int64_t dimension(int i) const { return i / run * outer + i % run * inner; }
};

struct KvPages {
    Pages keys, values;
    int block_size, num_blocks;
};

// float16 [num_blocks, kv_head, block_size], or null: 1.
struct SlotScales {
    Half* data;
    std::int64_t block, head;  // strides

    __device__ Half& at(std::int64_t block_id, int head_id, int slot) const {
        return data[block_id * block + head_id * head + slot];
    }
    __device__ float of(std::int64_t block_id, int head_id, int slot) const {
        return data ? to_float(at(block_id, head_id, slot)) : 1.0F;
    }
};

// A stored number times its scale is the number that was written. There is one scale, or one for each kv head (null:
// 1), or one for each slot of each head.
struct KvScales {
    const float* keys;
    const float* values;
    int per_head;  // 0: one for all
    SlotScales key_slots, value_slots;

    __device__ float key(int head) const { return keys ? keys[per_head ? head : 0] : 1.0F; }
    __device__ float value(int head) const { return values ? values[per_head ? head : 0] : 1.0F; }
};

}  // namespace octavo::cuda
