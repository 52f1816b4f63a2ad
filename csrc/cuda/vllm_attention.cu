#include "vllm_attention.cuh"

#include "attention.h"
#include "common/dispatch.h"

namespace octavo::cuda {

void vllm_paged_attention(const TensorRef& out, const TensorRef& exp_sums, const TensorRef& max_logits,
                          const TensorRef& partial_out, const TensorRef& queries, const KvCache& kv,
                          const TensorRef& tables, const TensorRef& lens, int max_len, int partition_size,
                          const Attention& attention, StreamHandle stream) {
    const KvLayer layer = make_kv_layer(kv, queries.dtype);
    const AttentionParams p = make_params(out, queries, layer, tables, lens, attention, TensorRef{});
    require(queries.shape[0] == tables.shape[0], "query", "does not have one row per sequence");
    const int span = partition_size > 0 ? partition_size : max_len;
    const int partitions = partition_size > 0 ? std::max(1, (max_len + span - 1) / span) : 1;
    if (partition_size > 0) {
        expect(exp_sums, "exp_sums", {p.num_heads == 0 ? 0 : queries.shape[0], queries.shape[1], partitions},
               DType::kF32);
        expect(max_logits, "max_logits", {queries.shape[0], queries.shape[1], partitions}, DType::kF32);
        expect(partial_out, "tmp_out", {queries.shape[0], queries.shape[1], partitions, queries.shape[2]},
               queries.dtype);
        expect_dense(exp_sums, "exp_sums");
        expect_dense(max_logits, "max_logits");
        expect_dense(partial_out, "tmp_out");
    }
    if (queries.size() == 0) {
        return;
    }
    const std::size_t shared = vllm_shared_bytes(std::max(span, 1), layer.head_dim);
    require(shared <= 227 * 1024, "max_seq_len", "does not fit into shared memory: use paged_attention_v2");
    const dim3 grid(static_cast<unsigned>(p.num_heads), static_cast<unsigned>(queries.shape[0]),
                    static_cast<unsigned>(partitions));
    with_kv(queries.dtype, layer.type, "query", [&](auto t, auto c) {
        using T = typename decltype(t)::Type;
        using C = typename decltype(c)::Type;
        const VllmParams<T> v{p, exp_sums.as<float>(), max_logits.as<float>(), partial_out.as<T>(), span, partitions};
        launch(vllm_attention_kernel<T, C>, grid, kVllmThreads, shared, as_stream(stream), v);
        if (partition_size > 0) {
            launch(vllm_reduce_kernel<T>, dim3(grid.x, grid.y), kVllmThreads, 0, as_stream(stream), v);
        }
    });
}

}  // namespace octavo::cuda
