// What the attention kernels share: their parameters, how a score is made, and how results are put together.
//
// Softmax is taken in base 2: scores are multiplied with log2(e) once. A part of a row's keys gives (max, sum, acc):
// sum = sum of 2^(score - max), acc[d] = sum of 2^(score - max) * value[d].
#pragma once

#include <limits>

#include "common/numeric.cuh"
#include "common/pages.cuh"
#include "common/reduce.cuh"
#include "plan/attention_plan.h"

namespace octavo::cuda {

constexpr float kLog2e = 1.44269504088896341F;
constexpr float kLn2 = 0.69314718055994531F;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct ScoreParams {
    float scale, soft_cap;                                            // soft_cap 0: none
    int window;                                                       // 0: none
    const float* alibi;                                               // [heads] or null
    const float* sinks;                                               // [heads] or null
    int local_blocks, vert_stride, sparse_block, head_step, tp_rank;  // vert_stride <= 1: not sparse
};

struct AttentionParams {
    void* out;                   // T [rows, heads, head_dim]
    const void* queries;         // T [rows, heads, head_dim]; decode: a row per sequence
    float* lse;                  // [rows, heads] or null: log2 of the sum of 2^score
    const std::int32_t* tables;  // [sequences, table_stride]: entries past a sequence's last block are never read
    const std::int32_t* lens;    // [sequences]
    const std::int32_t* cu_q;    // [sequences + 1]; prefill only
    const std::int32_t* slots;   // [grid + 1]
    const plan::Item* items;
    std::int32_t* counters;  // zeros
    float* partials;         // [partial][rows per item][head_dim + 2]: acc, max, sum
    std::int64_t out_row, out_head, query_row, query_head, table_stride;
    KvPages kv;
    KvScales scales;
    ScoreParams score;
    int num_heads, num_kv_heads, head_dim;
    int group;                             // query heads per kv head
    int subgroups;                         // items per kv head: query heads are taken kRows at a time
    std::uint32_t byte_shift, byte_scale;  // how fp8 becomes 16-bit; see tile.cuh
};

// Scores of one query head against keys, from the product of query and key.
struct RowScore {
    float scale;  // with the key's scale; base 2 unless there is a cap
    float slope;  // base 2
    float cap;    // base 2
    float inner;  // 1 / cap
    int sparse_offset;

    __device__ __forceinline__ RowScore(const ScoreParams& p, int head, int kv_head, int num_heads, int num_kv_heads,
                                        float key_scale) {
        const bool capped = p.soft_cap > 0.0F;
        scale = p.scale * key_scale * (capped ? 1.0F : kLog2e);
        inner = capped ? 1.0F / p.soft_cap : 0.0F;
        cap = p.soft_cap * kLog2e;
        slope = p.alibi ? p.alibi[head] * kLog2e : 0.0F;
        sparse_offset = p.head_step >= 0 ? (p.tp_rank * num_heads + head) * p.head_step + 1
                                         : (p.tp_rank * num_kv_heads + kv_head) * -p.head_step + 1;
    }

    __device__ __forceinline__ float operator()(float product, int distance) const {
        float score = product * scale;
        if (inner != 0.0F) {
            score = cap * tanhf(score * inner);
        }
        return score - slope * static_cast<float>(distance);
    }

    // Whether the query at `position` sees `key`, which is not after it.
    __device__ __forceinline__ bool sees(const ScoreParams& p, int position, int key) const {
        bool seen = (p.window <= 0) | (position - key < p.window);
        if (p.vert_stride > 1) {
            const int block = key / p.sparse_block;
            seen = seen & (((block + sparse_offset) % p.vert_stride == 0) |
                           (block > position / p.sparse_block - p.local_blocks));
        }
        return seen;
    }
};

// 2^(score - maximum) where both may be minus infinity.
__device__ __forceinline__ float weight_of(float score, float maximum) {
    return maximum == kMinusInfinity ? 0.0F : fast_exp2(score - maximum);
}

// What a row's parts give together. `sink`: in base 2, or minus infinity. Returns what acc is to be multiplied with.
__device__ __forceinline__ float close_row(float maximum, float sum, float sink, float value_scale, float& lse) {
    const float top = fmaxf(maximum, sink);
    const float factor = weight_of(maximum, top);
    const float total = sum * factor + weight_of(sink, top);
    lse = total == 0.0F ? kMinusInfinity : top + log2f(total);
    return total > 0.0F ? factor * value_scale / total : total == 0.0F ? 0.0F : total;  // NaN stays NaN
}

__device__ __forceinline__ float sink_of(const ScoreParams& p, int head) {
    return p.sinks ? p.sinks[head] * kLog2e : kMinusInfinity;
}

// The result of a decode item, in shared memory: acc [kRows][head_dim] (row r at acc + r * pitch), maximum and sum
// [kRows]. Written to the output if the item is the whole; else kept, and whoever comes last merges all parts, in
// order.
template <typename T, int kRows>
__device__ __forceinline__ void finish_item(const AttentionParams& p, const plan::Item& item, const float* acc,
                                            int pitch, const float* maximum, const float* sum, int* flag) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const int kv_head = item.head / p.subgroups, first_row = item.head % p.subgroups * kRows;
    const int rows = min(kRows, p.group - first_row), first_head = kv_head * p.group + first_row;
    const float value_scale = p.scales.value(kv_head);
    T* out = static_cast<T*>(p.out) + item.sequence * p.out_row + first_head * p.out_head;
    float* lse = p.lse ? p.lse + static_cast<std::int64_t>(item.sequence) * p.num_heads + first_head : nullptr;
    if (item.partial < 0) {
        for (int i = thread; i < rows * p.head_dim; i += threads) {
            const int r = i / p.head_dim, d = i % p.head_dim;
            float row_lse;
            const float factor = close_row(maximum[r], sum[r], sink_of(p.score, first_head + r), value_scale, row_lse);
            from_float(acc[r * pitch + d] * factor, out[r * p.out_head + d]);
            if (lse && d == 0) {
                lse[r] = row_lse;
            }
        }
        return;
    }
    const int width = p.head_dim + 2;
    float* mine = p.partials + static_cast<std::int64_t>(item.partial) * kRows * width;
    for (int i = thread; i < rows * width; i += threads) {
        const int r = i / width, d = i % width;
        mine[i] = d < p.head_dim ? acc[r * pitch + d] : d == p.head_dim ? maximum[r] : sum[r];
    }
    __threadfence();
    __syncthreads();
    if (thread == 0) {
        *flag = add_acquire_release(p.counters + item.counter, 1) == item.parts - 1 ? 1 : 0;
        if (*flag) {
            p.counters[item.counter] = 0;  // for the next layer
        }
    }
    __syncthreads();
    if (*flag == 0) {
        return;
    }
    __threadfence();
    const float* parts = p.partials + static_cast<std::int64_t>(item.first) * kRows * width;
    for (int i = thread; i < rows * p.head_dim; i += threads) {
        const int r = i / p.head_dim, d = i % p.head_dim;
        float top = kMinusInfinity;
        for (int part = 0; part < item.parts; ++part) {
            top = fmaxf(top, load_shared_result(parts + (part * kRows * width + r * width + p.head_dim)));
        }
        float total = 0.0F, value = 0.0F;
        for (int part = 0; part < item.parts; ++part) {
            const float* one = parts + (static_cast<std::int64_t>(part) * kRows * width + r * width);
            const float factor = weight_of(load_shared_result(one + p.head_dim), top);
            total += factor * load_shared_result(one + p.head_dim + 1);
            value += factor * load_shared_result(one + d);
        }
        float row_lse;
        const float factor = close_row(top, total, sink_of(p.score, first_head + r), value_scale, row_lse);
        from_float(value * factor, out[r * p.out_head + d]);
        if (lse && d == 0) {
            lse[r] = row_lse;
        }
    }
}

}  // namespace octavo::cuda
