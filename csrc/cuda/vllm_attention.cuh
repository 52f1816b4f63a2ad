// paged_attention_v1 and _v2 as vLLM has them: one block per query head (and partition of the keys), all its scores in
// shared memory, no tensor cores. For compatibility, and to measure against; decode_mma is what octavo runs.
#pragma once

#include "attention.cuh"

namespace octavo::cuda {

constexpr int kVllmThreads = 128;

template <typename T>
struct VllmParams {
    AttentionParams attention;
    float* exp_sums;    // [sequences, heads, partitions], or null: the output is written at once
    float* max_logits;  // likewise; natural base
    T* partial_out;     // [sequences, heads, partitions, head_dim]
    int span;           // keys of a partition
    int partitions;
};

constexpr std::size_t vllm_shared_bytes(int span, int head_dim) {
    return 4 * static_cast<std::size_t>(span + head_dim * 5 + 8);
}

// How many keys a sequence has: no more than the launch was made for.
template <typename T>
__device__ __forceinline__ int vllm_len(const VllmParams<T>& v, int sequence) {
    const int len = v.attention.lens[sequence];
    const int most = static_cast<int>(min(std::int64_t{v.span} * v.partitions, std::int64_t{v.attention.max_keys}));
    return is_one_of(len, std::int64_t{most} + 1, v.attention.fault, Fault::kSeqLens) ? len : 0;
}

template <typename T, typename C>
__global__ void __launch_bounds__(kVllmThreads) vllm_attention_kernel(const VllmParams<T> v) {
    const AttentionParams& p = v.attention;
    const int head = static_cast<int>(blockIdx.x), sequence = static_cast<int>(blockIdx.y);
    const int partition = static_cast<int>(blockIdx.z), kv_head = head / p.group;
    const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
    const int len = vllm_len(v, sequence), begin = partition * v.span, end = min(len, begin + v.span);
    if (begin >= end && partition > 0) {
        return;
    }
    const std::int32_t* table = p.tables + sequence * p.table_stride;
    const T* query = static_cast<const T*>(p.queries) + sequence * p.query_row + head * p.query_head;
    const auto* keys = static_cast<const C*>(p.kv.keys.data);
    const auto* values = static_cast<const C*>(p.kv.values.data);
    auto* logits = reinterpret_cast<float*>(shared_memory());
    float* q = logits + v.span;
    float* acc = q + p.head_dim;  // [4 warps][head_dim]
    float* space = acc + 4 * p.head_dim;
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
            const int slot = key % p.kv.block_size;
            const std::int64_t place = p.kv.keys.offset(block, kv_head, slot);
            float product = 0.0F;
            for (int d = 0; d < p.head_dim; ++d) {
                product += q[d] * to_float(keys[place + p.kv.keys.dimension(d)]);
            }
            score = row(product, len - 1 - key);
        }
        logits[key - begin] = score;
        top = fmaxf(top, score);
    }
    top = reduce_block(top, space, Larger{});
    float sum = 0.0F;
    for (int i = thread; i < end - begin; i += kVllmThreads) {
        logits[i] = weight_of(logits[i], top);
        sum += logits[i];
    }
    sum = reduce_block(sum, space, Add{});
    for (int d = lane; d < p.head_dim; d += 32) {
        float value = 0.0F;
        for (int key = begin + warp; key < end; key += 4) {
            const float weight = logits[key - begin];
            if (weight != 0.0F) {                                         // what is not seen may be anything
                const std::int32_t block = table[key / p.kv.block_size];  // one that is there: else nothing weighs
                const std::int64_t place = p.kv.values.offset(block, kv_head, key % p.kv.block_size);
                value += weight * to_float(values[place + p.kv.values.dimension(d)]);
            }
        }
        acc[warp * p.head_dim + d] = value;
    }
    __syncthreads();
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
    for (int d = thread; d < p.head_dim; d += kVllmThreads) {
        from_float((acc[d] + acc[p.head_dim + d] + acc[2 * p.head_dim + d] + acc[3 * p.head_dim + d]) * factor, out[d]);
    }
}

// A block per query head: puts its partitions together.
template <typename T>
__global__ void __launch_bounds__(kVllmThreads) vllm_reduce_kernel(const VllmParams<T> v) {
    const AttentionParams& p = v.attention;
    const int head = static_cast<int>(blockIdx.x), sequence = static_cast<int>(blockIdx.y);
    const int parts = max(1, (vllm_len(v, sequence) + v.span - 1) / v.span);
    const std::int64_t first = (std::int64_t{sequence} * p.num_heads + head) * v.partitions;
    const float sink = sink_of(p.score, head) * kLn2;
    float top = sink;
    for (int part = 0; part < parts; ++part) {
        top = fmaxf(top, v.max_logits[first + part]);
    }
    float total = weight_of(sink * kLog2e, top * kLog2e);
    for (int part = 0; part < parts; ++part) {
        total += v.exp_sums[first + part] * weight_of(v.max_logits[first + part] * kLog2e, top * kLog2e);
    }
    T* out = static_cast<T*>(p.out) + sequence * p.out_row + head * p.out_head;
    for (int d = static_cast<int>(threadIdx.x); d < p.head_dim; d += kVllmThreads) {
        float value = 0.0F;
        for (int part = 0; part < parts; ++part) {
            const float weight =
                v.exp_sums[first + part] * weight_of(v.max_logits[first + part] * kLog2e, top * kLog2e);
            value += weight == 0.0F ? 0.0F : weight * to_float(v.partial_out[(first + part) * p.head_dim + d]);
        }
        from_float(total == 0.0F ? 0.0F : value / total, out[d]);
    }
}

}  // namespace octavo::cuda
