// Paged decode and prefill without tensor cores: float32, odd head sizes, any layout. This is the kernel to read first.
//
// A thread block of 4 warps takes an item: a range of keys for a tile of kSimtRows rows. The warps take turns at 32
// keys. Each lane computes the scores of one key; then the lanes share the dimensions of the values.
#pragma once

#include <type_traits>

#include "attention.cuh"

namespace octavo::cuda {

constexpr int kSimtThreads = 128;
constexpr int kSimtRows = 8;

struct SimtShared {
    float* queries;  // [kSimtRows][head_dim]
    float* acc;      // [4 warps][kSimtRows][head_dim]
    float* weights;  // [4 warps][kSimtRows][32]
    float* maximum;  // [4 warps][kSimtRows]
    float* sum;      // [4 warps][kSimtRows]
    int* flag;
};

constexpr std::size_t simt_shared_bytes(int head_dim) {
    return 4 * static_cast<std::size_t>(kSimtRows * head_dim * 5 + 4 * kSimtRows * 34 + 4);
}

__device__ __forceinline__ SimtShared simt_shared(int head_dim) {
    SimtShared s;
    s.queries = reinterpret_cast<float*>(shared_memory());
    s.acc = s.queries + kSimtRows * head_dim;
    s.weights = s.acc + 4 * kSimtRows * head_dim;
    s.maximum = s.weights + 4 * kSimtRows * 32;
    s.sum = s.maximum + 4 * kSimtRows;
    s.flag = reinterpret_cast<int*>(s.sum + 4 * kSimtRows);
    return s;
}

// A warp's share of the keys, into its part of s.acc, s.maximum and s.sum.
template <typename T, typename C>
__device__ __forceinline__ void simt_warp(const AttentionParams& p, const plan::Item& item, const Rows& rows,
                                          const SimtShared& s) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int kv_head = item.head;
    const std::int32_t* table = p.tables + item.sequence * p.table_stride;
    const auto* keys = static_cast<const C*>(p.kv.keys.data);
    const auto* values = static_cast<const C*>(p.kv.values.data);
    float* acc = s.acc + warp * kSimtRows * p.head_dim;
    float* weights = s.weights + warp * kSimtRows * 32;
    float* maximum = s.maximum + warp * kSimtRows;
    float* sum = s.sum + warp * kSimtRows;
    for (int i = lane; i < kSimtRows * p.head_dim; i += 32) {
        acc[i] = 0.0F;
    }
    if (lane < kSimtRows) {
        maximum[lane] = kMinusInfinity;
        sum[lane] = 0.0F;
    }
    __syncwarp();
    for (int start = item.begin + 32 * warp; start < item.end; start += 32 * 4) {
        const int key = start + lane;
        std::int64_t value_place = -1;
        float key_scale = 1.0F, value_scale = 1.0F;  // of this slot alone
        float scores[kSimtRows];
#pragma unroll
        for (int r = 0; r < kSimtRows; ++r) {
            scores[r] = 0.0F;
        }
        const std::int32_t block = key < item.end ? block_of(p, table, key) : -1;
        if (block >= 0) {
            const int slot = key % p.kv.block_size;
            const std::int64_t place = p.kv.keys.offset(block, kv_head, slot);
            value_place = p.kv.values.offset(block, kv_head, slot);
            if constexpr (std::is_same_v<C, std::int8_t>) {
                key_scale = p.scales.key_slots.of(block, kv_head, slot);
                value_scale = p.scales.value_slots.of(block, kv_head, slot);
            }
            for (int d = 0; d < p.head_dim; ++d) {
                const float x = to_float(keys[place + p.kv.keys.dimension(d)]);
#pragma unroll
                for (int r = 0; r < kSimtRows; ++r) {
                    scores[r] += x * s.queries[r * p.head_dim + d];
                }
            }
        }
        for (int r = 0; r < rows.count; ++r) {
            const int position = rows.position(r);
            const RowScore row(p.score, rows.head(r), kv_head, p.num_heads, p.num_kv_heads, p.scales.key(kv_head));
            float product = scores[0];
#pragma unroll
            for (int i = 1; i < kSimtRows; ++i) {
                product = i == r ? scores[i] : product;
            }
            const bool seen = value_place >= 0 && key <= position && row.sees(p.score, position, key);
            const float score = seen ? row(product * key_scale, position - key) : kMinusInfinity;
            const float before = maximum[r], top = fmaxf(before, reduce_warp(score, Larger{}));
            const float weight = weight_of(score, top), rescale = weight_of(before, top);
            const float added = reduce_warp(weight, Add{});
            weights[r * 32 + lane] = weight;
            __syncwarp();
            if (lane == 0) {
                maximum[r] = top;
                sum[r] = sum[r] * rescale + added;
            }
            for (int d = lane; d < p.head_dim; d += 32) {
                acc[r * p.head_dim + d] *= rescale;
            }
            __syncwarp();
        }
        const int some = min(32, item.end - start);
        for (int j = 0; j < some; ++j) {
            const std::int64_t place = __shfl_sync(kAllLanes, value_place, j);
            const float scale = std::is_same_v<C, std::int8_t> ? __shfl_sync(kAllLanes, value_scale, j) : 1.0F;
            for (int d = lane; d < p.head_dim && place >= 0; d += 32) {
                const float x = to_float(values[place + p.kv.values.dimension(d)]) * scale;
                for (int r = 0; r < rows.count; ++r) {
                    acc[r * p.head_dim + d] += weights[r * 32 + j] * x;
                }
            }
        }
        __syncwarp();
    }
}

// The four warps' parts become one, in warp 0's place.
__device__ __forceinline__ void simt_join(const AttentionParams& p, const SimtShared& s) {
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < kSimtRows * p.head_dim; i += kSimtThreads) {
        const int r = i / p.head_dim;
        float top = s.maximum[r];
        for (int warp = 1; warp < 4; ++warp) {
            top = fmaxf(top, s.maximum[warp * kSimtRows + r]);
        }
        float value = 0.0F;
        for (int warp = 0; warp < 4; ++warp) {
            value += weight_of(s.maximum[warp * kSimtRows + r], top) * s.acc[warp * kSimtRows * p.head_dim + i];
        }
        s.acc[i] = value;
    }
    __syncthreads();
    if (thread < kSimtRows) {
        float top = s.maximum[thread], total = 0.0F;
        for (int warp = 1; warp < 4; ++warp) {
            top = fmaxf(top, s.maximum[warp * kSimtRows + thread]);
        }
        for (int warp = 0; warp < 4; ++warp) {
            total += weight_of(s.maximum[warp * kSimtRows + thread], top) * s.sum[warp * kSimtRows + thread];
        }
        s.maximum[thread] = top;
        s.sum[thread] = total;
    }
    __syncthreads();
}

template <typename T, typename C>
__global__ void __launch_bounds__(kSimtThreads, 4) attention_simt_kernel(const AttentionParams p) {
    const SimtShared s = simt_shared(p.head_dim);
#pragma unroll 1
    for (int i = first_item(p); i < end_item(p); ++i) {
        const plan::Item item = p.items[i];
        const Rows rows(p, item, kSimtRows);
        if (rows.count == 0) {
            continue;
        }
        for (int j = static_cast<int>(threadIdx.x); j < kSimtRows * p.head_dim; j += kSimtThreads) {
            const int r = j / p.head_dim;
            s.queries[j] = r < rows.count ? to_float(rows.query<T>(p, r)[j % p.head_dim]) : 0.0F;
        }
        __syncthreads();
        simt_warp<T, C>(p, item, rows, s);
        __syncthreads();
        simt_join(p, s);
        if (p.head_dim % 4 == 0) {
            finish_item<T, 4>(p, item, rows, kSimtRows, s.acc, p.head_dim, s.maximum, s.sum, s.weights, s.flag);
        } else {
            finish_item<T, 1>(p, item, rows, kSimtRows, s.acc, p.head_dim, s.maximum, s.sum, s.weights, s.flag);
        }
        __syncthreads();
    }
}

}  // namespace octavo::cuda
