// What the attention kernels share: their parameters, how a score is made, and how partial results are merged.
//
// Softmax is computed in base 2: scores are multiplied with log2(e) once. A part of a row's keys gives (max, sum, acc):
// sum = sum of 2^(score - max), acc[d] = sum of 2^(score - max) * value[d].
//
// Parts are merged in order of keys, kMerged at a time: what 32 parts give takes the place of the first of them, and 32
// of those are merged in turn. Each merge is made by the thread block that comes last, so merges run side by side.
#pragma once

#include <limits>

#include "common/fault.cuh"
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
    void* out;                   // T [tokens, heads, head_dim]
    const void* queries;         // T [tokens, heads, head_dim]
    const std::int32_t* tables;  // [sequences, table_stride]: entries past a sequence's last block are never read
    const std::int32_t* lens;    // [sequences]: keys
    const std::int32_t* cu_q;    // [sequences + 1]: a sequence's queries are its last tokens
    const std::int32_t* slots;   // [grid + 1]
    const plan::Item* items;
    std::int32_t* counters;  // zeros
    float* partials;         // [partial]: acc [rows of a tile][head_dim], max [rows], sum [rows]
    std::int64_t out_row, out_head, query_row, query_head, table_stride;
    KvPages kv;
    KvScales scales;
    ScoreParams score;
    int num_heads, num_kv_heads, head_dim;
    int group;  // query heads per kv head
    int num_tokens, num_sequences, num_items, num_partials;
    int max_keys;        // that a row of tables has room for
    bool whole_queries;  // queries lie at multiples of 16 bytes
    FaultWord fault;
    Fp8Constants fp8;
};

// The items of a thread block. Numbers on the device are checked here and below, because the host cannot look at them.
__device__ __forceinline__ int first_item(const AttentionParams& p) { return max(p.slots[blockIdx.x], 0); }
__device__ __forceinline__ int end_item(const AttentionParams& p) { return min(p.slots[blockIdx.x + 1], p.num_items); }

__device__ __forceinline__ bool is_possible(const AttentionParams& p, const plan::Item& item) {
    const auto below = [](int number, int limit) {
        return static_cast<unsigned>(number) < static_cast<unsigned>(limit);
    };
    const bool place = below(item.sequence, p.num_sequences) & below(item.head, p.num_kv_heads) & (item.row >= 0);
    const bool keys = (item.begin >= 0) & (item.begin <= item.end) & (item.end <= p.max_keys);
    const bool parts = (item.parts > 1) & below(item.part, item.parts) & (item.first >= 0) &
                       (item.parts <= p.num_partials - max(item.first, 0));
    return place & keys & ((item.parts == 1) | parts);
}

// The block that `key` is in, or -1.
__device__ __forceinline__ std::int32_t block_of(const AttentionParams& p, const std::int32_t* table, int key) {
    const std::int32_t block = table[key / p.kv.block_size];
    return is_one_of(block, p.kv.num_blocks, p.fault, Fault::kBlockTables) ? block : -1;
}

// The rows of an item: row r of it is query head `head(r)` of token `token(r)`, whose place in its sequence is
// `position(r)`. None of an item that cannot be.
struct Rows {
    int first = 0, count = 0;  // of the sequence's rows for this kv head
    int first_token = 0, first_position = 0, first_head = 0, group = 1;

    __device__ __forceinline__ Rows(const AttentionParams& p, const plan::Item& item, int tile) {
        if (!is_possible(p, item)) {
            tell(p.fault, Fault::kPlan);
            return;
        }
        const int begin = p.cu_q[item.sequence], end = p.cu_q[item.sequence + 1], keys = p.lens[item.sequence];
        const int queries = (begin >= 0) & (begin <= end) & (end <= p.num_tokens) ? end - begin : 0;
        if ((keys < 0) | (keys > p.max_keys) | (queries * p.group <= item.row)) {
            tell(p.fault, (keys < 0) | (keys > p.max_keys) ? Fault::kSeqLens : Fault::kCuQ);
            return;
        }
        first = item.row;
        count = min(tile, queries * p.group - first);
        first_token = begin;
        first_position = keys - queries;
        first_head = item.head * p.group;
        group = p.group;
    }
    __device__ __forceinline__ int token(int r) const { return first_token + (first + r) / group; }
    __device__ __forceinline__ int position(int r) const { return first_position + (first + r) / group; }
    __device__ __forceinline__ int head(int r) const { return first_head + (first + r) % group; }

    template <typename T>
    __device__ __forceinline__ const T* query(const AttentionParams& p, int r) const {
        return static_cast<const T*>(p.queries) + token(r) * p.query_row + head(r) * p.query_head;
    }
    template <typename T>
    __device__ __forceinline__ T* out(const AttentionParams& p, int r) const {
        return static_cast<T*>(p.out) + token(r) * p.out_row + head(r) * p.out_head;
    }
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

// 2^(score - maximum), where the score may be minus infinity, and then the maximum, too. NaN stays NaN.
__device__ __forceinline__ float weight_of(float score, float maximum) {
    return score == kMinusInfinity ? 0.0F : fast_exp2(score - maximum);
}

// What a row's parts give together. `sink`: in base 2, or minus infinity. Returns what acc is to be multiplied with.
__device__ __forceinline__ float close_row(float maximum, float sum, float sink, float value_scale) {
    const float top = fmaxf(maximum, sink);
    const float factor = weight_of(maximum, top);
    const float total = sum * factor + weight_of(sink, top);
    return total > 0.0F ? factor * value_scale / total : total == 0.0F ? 0.0F : total;  // NaN stays NaN
}

__device__ __forceinline__ float sink_of(const ScoreParams& p, int head) {
    return p.sinks ? p.sinks[head] * kLog2e : kMinusInfinity;
}

// Where a partial result of an item's tile lies: acc [tile][head_dim], max [tile], sum [tile].
__device__ __forceinline__ float* partial_of(const AttentionParams& p, const plan::Item& item, int part, int tile) {
    return p.partials + static_cast<std::int64_t>(item.first + part) * tile * (p.head_dim + 2);
}

constexpr int kMerged = 32;  // parts that are merged at a time: one for each lane

// All threads call this when they have stored their share. Whether this thread block is the last of `count` to come;
// then the counter is 0 again, for the next layer. `flag`: shared memory.
__device__ __forceinline__ bool comes_last(std::int32_t* counter, int count, int* flag) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        *flag = add_acquire_release(counter, 1) == count - 1 ? 1 : 0;
        if (*flag) {
            *counter = 0;
        }
    }
    __syncthreads();
    const bool last = *flag != 0;
    __threadfence();
    return last;
}

// Neighbours that are moved at once: 4 begin at a multiple of 16 bytes.
template <int kCount>
struct alignas(4 * kCount) Floats {
    float at[kCount];
};

// `count` partial results, `step` parts apart from part `first` on, become one: the output if they are all there is
// (`whole`), else it takes the first one's place. kCount: floats that are moved at once. `weights`: shared memory,
// [kMerged][tile].
template <typename T, int kCount>
__device__ __forceinline__ void merge_parts(const AttentionParams& p, const plan::Item& item, const Rows& rows,
                                            int tile, int first, int step, int count, bool whole, float* weights) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    const std::int64_t apart = static_cast<std::int64_t>(step) * tile * (p.head_dim + 2);
    float* target = partial_of(p, item, first, tile);
    float* maxima = target + tile * p.head_dim;
    const float value_scale = p.scales.value(item.head);
    // A warp per row, a lane per part: what each part's numbers are multiplied with.
    const int lane = thread % 32;
#pragma unroll 1
    for (int r = thread / 32; r < rows.count; r += threads / 32) {
        const float* state = maxima + min(lane, count - 1) * apart + r;
        const float maximum = load_shared_result(state), sum = load_shared_result(state + tile);
        const float top = reduce_warp(maximum, Larger{});
        const float weight = lane < count ? weight_of(maximum, top) : 0.0F;
        const float total = reduce_warp(weight * sum, Add{});
        if (lane < count) {
            const float factor = whole ? close_row(top, total, sink_of(p.score, rows.head(r)), value_scale) : 1.0F;
            weights[lane * tile + r] = weight * factor;
        }
        if (lane == 0 && !whole) {
            maxima[r] = top;
            maxima[tile + r] = total;
        }
    }
    __syncthreads();
    const int pieces = p.head_dim / kCount;
#pragma unroll 1
    for (int i = thread; i < rows.count * pieces; i += threads) {
        const int r = i / pieces, d = i % pieces * kCount;
        float* place = target + r * p.head_dim + d;
        Floats<kCount> total{};
        constexpr int kAtOnce = 8;  // loads on their way
#pragma unroll 1
        for (int part = 0; part < count; part += kAtOnce) {
            Floats<kCount> some[kAtOnce];
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                load_shared_results(place + min(part + j, count - 1) * apart, some[j].at);
            }
#pragma unroll
            for (int j = 0; j < kAtOnce; ++j) {
                if (part + j < count) {
                    const float weight = weights[(part + j) * tile + r];
#pragma unroll
                    for (int k = 0; k < kCount; ++k) {
                        total.at[k] += weight * some[j].at[k];
                    }
                }
            }
        }
        if (whole) {
#pragma unroll
            for (int k = 0; k < kCount; ++k) {
                from_float(total.at[k], rows.out<T>(p, r)[d + k]);
            }
        } else {
            *reinterpret_cast<Floats<kCount>*>(place) = total;
        }
    }
}

// All threads call this when they have stored their share of a part. kCount: floats that are moved at once. `space`:
// shared memory, [kMerged][tile].
template <typename T, int kCount>
__device__ __forceinline__ void join_parts(const AttentionParams& p, const plan::Item& item, const Rows& rows, int tile,
                                           float* space, int* flag) {
#pragma unroll 1
    for (int step = 1, level = 0;; step *= kMerged, ++level) {
        const int first = item.part / (step * kMerged) * (step * kMerged);
        const int count = min(kMerged, (item.parts - first + step - 1) / step);
        const bool whole = item.parts <= step * kMerged;
        if (count > 1) {  // else there is nobody to wait for at this level
            // Levels have counters of their own: with more than one part at a level, there are more parts than levels.
            if (!comes_last(p.counters + item.first + first + level, count, flag)) {
                return;
            }
            merge_parts<T, kCount>(p, item, rows, tile, first, step, count, whole, space);
        }
        if (whole) {
            return;
        }
    }
}

// The result of an item that is in shared memory: acc [rows][head_dim] (row r at acc + r * pitch), maximum and sum
// [rows]. Written to the output if the item is the whole; else kept until all parts are there. kCount and `space`: see
// join_parts; `space` may be where acc is.
template <typename T, int kCount>
__device__ __forceinline__ void finish_item(const AttentionParams& p, const plan::Item& item, const Rows& rows,
                                            int tile, const float* acc, int pitch, const float* maximum,
                                            const float* sum, float* space, int* flag) {
    const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
    if (item.parts == 1) {
        const float value_scale = p.scales.value(item.head);
#pragma unroll 1
        for (int i = thread; i < rows.count * p.head_dim; i += threads) {
            const int r = i / p.head_dim, d = i % p.head_dim;
            const float factor = close_row(maximum[r], sum[r], sink_of(p.score, rows.head(r)), value_scale);
            from_float(acc[r * pitch + d] * factor, rows.out<T>(p, r)[d]);
        }
        return;
    }
    float* mine = partial_of(p, item, item.part, tile);
    const int pieces = p.head_dim / kCount;
#pragma unroll 1
    for (int i = thread; i < rows.count * pieces; i += threads) {
        const int r = i / pieces, d = i % pieces * kCount;
        *reinterpret_cast<Floats<kCount>*>(mine + r * p.head_dim + d) =
            *reinterpret_cast<const Floats<kCount>*>(acc + r * pitch + d);
    }
    if (thread < rows.count) {
        mine[tile * p.head_dim + thread] = maximum[thread];
        mine[tile * (p.head_dim + 1) + thread] = sum[thread];
    }
    join_parts<T, kCount>(p, item, rows, tile, space, flag);
}

}  // namespace octavo::cuda
