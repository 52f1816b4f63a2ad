// paged_attention_v1 and _v2 as vLLM has them: one block per query head (and partition of the keys), all its scores in
// shared memory, no tensor cores. For compatibility; decode_mma is what octavo runs.
//
// Keys and values lie in vLLM's layout, in which 16 bytes are neighbouring dimensions of one key, or one dimension of
// neighbouring keys (a packet). A thread takes a key and reads it by packets. A warp takes dimensions of the values and
// reads them by packets, so nothing is summed across warps.
#pragma once

#include "attention.cuh"

namespace octavo::cuda {

constexpr int kVllmThreads = 128;
constexpr int kVllmWarps = kVllmThreads / 32;

template <typename T>
struct VllmParams {
    AttentionParams attention;
    float* exp_sums;    // [sequences, heads, partitions], or null: the output is written at once
    float* max_logits;  // likewise; natural base
    T* partial_out;     // [sequences, heads, partitions, head_dim]
    int span;           // keys of a partition
    int partitions;
    bool packets;          // keys and values can be read by packets
    bool partial_packets;  // partial_out can
};

// Shared memory, in floats: [kVllmWarps * 2] to reduce in, [head_dim] the query, [span] the scores.
constexpr int kVllmSpace = 2 * kVllmWarps;
__host__ __device__ constexpr std::int64_t vllm_padded(std::int64_t count) { return (count + 15) / 16 * 16; }
constexpr std::size_t vllm_shared_bytes(std::int64_t span, int head_dim) {
    return 4 * static_cast<std::size_t>(kVllmSpace + vllm_padded(head_dim) + vllm_padded(span));
}
// That of the reduction: [kVllmSpace], [partitions] the weights, [kVllmThreads * packet] sums.
template <typename T>
constexpr std::size_t vllm_reduce_bytes(std::int64_t partitions) {
    return 4 * static_cast<std::size_t>(kVllmSpace + vllm_padded(partitions) + kVllmThreads * Packet<T>::kCount);
}

// How many keys a sequence has: no more than the launch was made for.
template <typename T>
__device__ __forceinline__ int vllm_len(const VllmParams<T>& v, int sequence) {
    const int len = v.attention.lens[sequence];
    const int most = static_cast<int>(min(std::int64_t{v.span} * v.partitions, std::int64_t{v.attention.max_keys}));
    return is_one_of(len, std::int64_t{most} + 1, v.attention.fault, Fault::kSeqLens) ? len : 0;
}

template <int kCount>
__device__ __forceinline__ void load_floats(const float* from, float (&x)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
        const Packet<float> four = load_packet(from + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            x[i + j] = four.at[j];
        }
    }
}

// The product of the query and the key at `place`, in four sums that do not wait for each other.
template <typename C>
__device__ __forceinline__ float vllm_product(const Pages& keys, std::int64_t place, const float* query, int head_dim,
                                              bool packets) {
    constexpr int kRun = Packet<C>::kCount;
    const C* key = static_cast<const C*>(keys.data) + place;
    float sums[4] = {};
    if (packets) {
#pragma unroll 4
        for (int d = 0; d < head_dim; d += kRun) {
            float x[kRun], q[kRun];
            to_floats(load_packet(key + d / kRun * keys.outer).at, x);
            load_floats(query + d, q);
#pragma unroll
            for (int j = 0; j < kRun; ++j) {
                sums[j % 4] += q[j] * x[j];
            }
        }
    } else {
        for (int d = 0; d < head_dim; ++d) {
            sums[0] += query[d] * to_float(key[keys.dimension(d)]);
        }
    }
    return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// What a head's values from `begin` to `end` add up to, by weights: out(dimension, sum) is called once for each
// dimension. What has no weight is not read, or does not count: it may be anything.
template <typename C, typename Out>
__device__ __forceinline__ void vllm_values(const AttentionParams& p, const std::int32_t* table, int kv_head, int begin,
                                            int end, const float* weights, Out out) {
    // A lane has several packets on their way: kRows dimensions of kPages blocks.
    constexpr int kRun = Packet<C>::kCount, kRows = 2, kPages = 32 / kRun;
    const Pages& pages = p.kv.values;
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int size = p.kv.block_size, per_row = size / kRun, rows = 32 / per_row, step = kVllmWarps * rows;
    const int part = lane % per_row * kRun;
    const auto* values = static_cast<const C*>(pages.data) + kv_head * pages.head + part * pages.token;
#pragma unroll 1
    for (int first = warp * rows; first < p.head_dim; first += kRows * step) {
        const int dim = first + lane / per_row;
        float sums[kRows] = {};
#pragma unroll 1
        for (int page = begin; page < end; page += kPages * size) {
            Packet<C> x[kPages][kRows] = {};
            float w[kPages][kRun];
#pragma unroll
            for (int i = 0; i < kPages; ++i) {
                const int key = page + i * size + part;
                bool any = false;
                if (key < end) {
                    load_floats(weights + key - begin, w[i]);
                }
#pragma unroll
                for (int j = 0; j < kRun; ++j) {
                    w[i][j] = key < end ? w[i][j] : 0.0F;
                    any = any || w[i][j] != 0.0F;
                }
                const C* from = values + (any ? table[key / size] * pages.block : 0);  // any: the block is there
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    if (any && dim + r * step < p.head_dim) {
                        x[i][r] = load_packet(from + (dim + r * step) * pages.outer);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < kPages; ++i) {
#pragma unroll
                for (int r = 0; r < kRows; ++r) {
                    if (first + r * step < p.head_dim) {
                        float y[kRun];
                        to_floats(x[i][r].at, y);
#pragma unroll
                        for (int j = 0; j < kRun; ++j) {
                            sums[r] += w[i][j] * (w[i][j] == 0.0F ? 0.0F : y[j]);
                        }
                    }
                }
            }
        }
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
            for (int bits = 1; bits < per_row; bits *= 2) {
                sums[r] += __shfl_xor_sync(kAllLanes, sums[r], bits);
            }
            if (part == 0 && dim + r * step < p.head_dim) {
                out(dim + r * step, sums[r]);
            }
        }
    }
}

template <typename T, typename C>
__global__ void __launch_bounds__(kVllmThreads) vllm_attention_kernel(const VllmParams<T> v) {
    const AttentionParams& p = v.attention;
    const int head = static_cast<int>(blockIdx.x), sequence = static_cast<int>(blockIdx.y);
    const int partition = static_cast<int>(blockIdx.z), kv_head = head / p.group;
    const int thread = static_cast<int>(threadIdx.x);
    const int len = vllm_len(v, sequence), begin = partition * v.span, end = min(len, begin + v.span);
    if (begin >= end && partition > 0) {
        return;
    }
    const std::int32_t* table = p.tables + sequence * p.table_stride;
    const T* query = static_cast<const T*>(p.queries) + sequence * p.query_row + head * p.query_head;
    auto* space = reinterpret_cast<float*>(shared_memory());
    float* q = space + kVllmSpace;
    float* logits = q + vllm_padded(p.head_dim);
    for (int d = thread; d < p.head_dim; d += kVllmThreads) {
        q[d] = to_float(query[d]);
    }
    __syncthreads();
    const RowScore row(p.score, head, kv_head, p.num_heads, p.num_kv_heads, p.scales.key(kv_head));
    float top = kMinusInfinity;
    for (int key = begin + thread; key < end; key += kVllmThreads) {
        float score = kMinusInfinity;
        const std::int32_t block = row.sees(p.score, len - 1, key) ? block_of(p, table, key) : -1;
        if (block >= 0) {
            const std::int64_t place = p.kv.keys.offset(block, kv_head, key % p.kv.block_size);
            score = row(vllm_product<C>(p.kv.keys, place, q, p.head_dim, v.packets), len - 1 - key);
        }
        logits[key - begin] = score;
        top = fmaxf(top, score);
    }
    top = reduce_block(top, space, Larger{});
    float sum = 0.0F;
    for (int i = thread; i < vllm_padded(end - begin); i += kVllmThreads) {
        logits[i] = i < end - begin ? weight_of(logits[i], top) : 0.0F;
        sum += logits[i];
    }
    sum = reduce_block(sum, space, Add{});
    T* out = static_cast<T*>(p.out) + sequence * p.out_row + head * p.out_head;
    const std::int64_t part = (std::int64_t{sequence} * p.num_heads + head) * v.partitions + partition;
    if (v.exp_sums) {
        out = v.partial_out + part * p.head_dim;
        if (thread == 0) {
            v.exp_sums[part] = sum;
            v.max_logits[part] = top * kLn2;
        }
    }
    const float sink = v.exp_sums ? kMinusInfinity : sink_of(p.score, head);
    const float factor = close_row(top, sum, sink, p.scales.value(kv_head));
    if (v.packets) {
        vllm_values<C>(p, table, kv_head, begin, end, logits,
                       [&](int d, float value) { from_float(value * factor, out[d]); });
        return;
    }
    const auto* values = static_cast<const C*>(p.kv.values.data);
    for (int d = thread; d < p.head_dim; d += kVllmThreads) {
        float value = 0.0F;
        for (int key = begin; key < end; ++key) {
            const float weight = logits[key - begin];
            if (weight != 0.0F) {                                         // what is not seen may be anything
                const std::int32_t block = table[key / p.kv.block_size];  // one that is there: else nothing weighs
                const std::int64_t place = p.kv.values.offset(block, kv_head, key % p.kv.block_size);
                value += weight * to_float(values[place + p.kv.values.dimension(d)]);
            }
        }
        from_float(value * factor, out[d]);
    }
}

// A block per query head: puts its partitions together. Threads share the partitions and, by packets, the dimensions.
template <typename T>
__global__ void __launch_bounds__(kVllmThreads) vllm_reduce_kernel(const VllmParams<T> v) {
    constexpr int kRun = Packet<T>::kCount;
    const AttentionParams& p = v.attention;
    const int head = static_cast<int>(blockIdx.x), sequence = static_cast<int>(blockIdx.y);
    const int thread = static_cast<int>(threadIdx.x);
    const int parts = max(1, (vllm_len(v, sequence) + v.span - 1) / v.span);
    const std::int64_t first = (std::int64_t{sequence} * p.num_heads + head) * v.partitions;
    auto* space = reinterpret_cast<float*>(shared_memory());
    float* weights = space + kVllmSpace;
    float* sums = weights + vllm_padded(v.partitions);
    const float sink = sink_of(p.score, head);
    float top = sink;
    for (int part = thread; part < parts; part += kVllmThreads) {
        weights[part] = v.max_logits[first + part] * kLog2e;
        top = fmaxf(top, weights[part]);
    }
    top = reduce_block(top, space, Larger{});
    float total = thread == 0 ? weight_of(sink, top) : 0.0F;
    for (int part = thread; part < parts; part += kVllmThreads) {
        weights[part] = v.exp_sums[first + part] * weight_of(weights[part], top);
        total += weights[part];
    }
    total = reduce_block(total, space, Add{});
    const T* partials = v.partial_out + first * p.head_dim;
    T* out = static_cast<T*>(p.out) + sequence * p.out_row + head * p.out_head;
    const auto store = [&](int d, float value) { from_float(total == 0.0F ? 0.0F : value / total, out[d]); };
    if (v.partial_packets) {
        const int pieces = p.head_dim / kRun, groups = kVllmThreads / pieces, group = thread / pieces;
        float mine[kRun] = {};
#pragma unroll 4
        for (int part = group < groups ? group : parts; part < parts; part += groups) {
            float x[kRun];
            to_floats(load_packet(partials + std::int64_t{part} * p.head_dim + thread % pieces * kRun).at, x);
#pragma unroll
            for (int j = 0; j < kRun; ++j) {
                mine[j] += weights[part] == 0.0F ? 0.0F : weights[part] * x[j];
            }
        }
#pragma unroll
        for (int j = 0; j < kRun; ++j) {
            sums[thread * kRun + j] = mine[j];
        }
        __syncthreads();
        for (int d = thread; d < p.head_dim; d += kVllmThreads) {
            float value = 0.0F;
            for (int i = 0; i < groups; ++i) {
                value += sums[i * p.head_dim + d];
            }
            store(d, value);
        }
        return;
    }
    for (int d = thread; d < p.head_dim; d += kVllmThreads) {
        float value = 0.0F;
        for (int part = 0; part < parts; ++part) {
            value +=
                weights[part] == 0.0F ? 0.0F : weights[part] * to_float(partials[std::int64_t{part} * p.head_dim + d]);
        }
        store(d, value);
    }
}

}  // namespace octavo::cuda
