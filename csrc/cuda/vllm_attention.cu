#include "vllm_attention.cuh"

#include "attention.h"
#include "common/dispatch.h"
#include "device.h"

namespace octavo::cuda {

namespace {

constexpr int kMostInGrid = 65535;  // but in its first dimension

// Whether the last dimension, of all rows, is whole packets.
bool in_packets(const TensorRef& t) {
    const std::int64_t size = size_of(t.dtype), last = t.ndim - 1;
    bool whole = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.shape[last] * size % 16 == 0;
    for (int i = 0; i < last; ++i) {
        whole = whole && (t.shape[i] == 1 || t.stride[i] * size % 16 == 0);
    }
    return whole;
}

// Whether the kernel can read the cache by packets: keys that have one for each run of dimensions, values that a warp's
// lanes share evenly. Thread blocks begin where a block of keys does.
bool in_packets(const KvCache& kv, int span, int partitions) {
    if (kv.keys.ndim != 5 || kv.keys.shape[4] * size_of(kv.keys.dtype) != 16 || !in_packets(kv.keys) ||
        !in_packets(kv.values)) {
        return false;
    }
    const std::int64_t size = kv.values.shape[3], per_row = size * size_of(kv.values.dtype) / 16;
    return 32 % per_row == 0 && (partitions == 1 || span % size == 0);
}

}  // namespace

void vllm_paged_attention(const TensorRef& out, const TensorRef& exp_sums, const TensorRef& max_logits,
                          const TensorRef& partial_out, const TensorRef& queries, const KvCache& kv,
                          const TensorRef& tables, const TensorRef& lens, int max_len, int partition_size,
                          const Attention& attention, StreamHandle stream) {
    AttentionParams p{};
    const KvLayer layer = make_params(p, out, queries, kv, tables, lens, attention);
    require(queries.shape[0] == tables.shape[0], "query", "does not have one row per sequence");
    require(queries.shape[0] <= kMostInGrid, "query", "has more sequences than a launch");
    require(!layer.scales.key_slots.data, "k_scale", "is for each slot, which vLLM does not have");
    require(max_len >= 0, "max_seq_len", "is negative");
    require(partition_size >= 0, "partition", "is negative");
    const int span = partition_size > 0 ? partition_size : max_len;
    const int partitions = partition_size > 0 ? std::max(1, max_len / span + (max_len % span > 0 ? 1 : 0)) : 1;
    require(partitions <= kMostInGrid, "max_seq_len", "has more partitions than a launch");
    if (partition_size > 0) {
        expect(exp_sums, "exp_sums", {queries.shape[0], queries.shape[1], partitions}, DType::kF32);
        expect(max_logits, "max_logits", {queries.shape[0], queries.shape[1], partitions}, DType::kF32);
        expect(partial_out, "tmp_out", {queries.shape[0], queries.shape[1], partitions, queries.shape[2]},
               queries.dtype);
        expect_dense(exp_sums, "exp_sums");
        expect_dense(max_logits, "max_logits");
        expect_dense(partial_out, "tmp_out");
        const std::initializer_list<const TensorRef*> others{
            &out,    &queries, &kv.keys, &kv.values, &kv.key_scale, &kv.value_scale, &attention.alibi, &attention.sinks,
            &tables, &lens};
        expect_apart(exp_sums, "exp_sums", others);
        expect_apart(max_logits, "max_logits", others);
        expect_apart(max_logits, "max_logits", {&exp_sums, &partial_out});
        expect_apart(partial_out, "tmp_out", others);
        expect_apart(partial_out, "tmp_out", {&exp_sums});
    }
    if (queries.size() == 0) {
        return;
    }
    const std::size_t shared = vllm_shared_bytes(std::max(span, 1), layer.head_dim);
    require(fits_shared(shared), "max_seq_len", "does not fit into shared memory: use paged_attention_v2");
    const bool packets = in_packets(kv, span, partitions);
    const dim3 grid(static_cast<unsigned>(p.num_heads), static_cast<unsigned>(queries.shape[0]),
                    static_cast<unsigned>(partitions));
    with_kv(queries.dtype, layer.type, "query", [&](auto t, auto c) {
        using T = typename decltype(t)::Type;
        using C = typename decltype(c)::Type;
        const bool partial_packets =
            partition_size > 0 && in_packets(partial_out) && layer.head_dim <= kVllmThreads * Packet<T>::kCount;
        const std::size_t reduce = vllm_reduce_bytes<T>(partitions);
        require(partition_size == 0 || fits_shared(reduce), "max_seq_len",
                "has more partitions than fit into shared memory");
        const VllmParams<T> v{
            p,       exp_sums.as<float>(), max_logits.as<float>(), partial_out.as<T>(), span, partitions,
            packets, partial_packets};
        launch(vllm_attention_kernel<T, C>, grid, kVllmThreads, shared, as_stream(stream), v);
        if (partition_size > 0) {
            launch(vllm_reduce_kernel<T>, dim3(grid.x, grid.y), kVllmThreads, reduce, as_stream(stream), v);
        }
    });
}

}  // namespace octavo::cuda
