#include "attention.h"

#include <cmath>
#include <cstdlib>

#include "common/dispatch.h"
#include "common/kv_cache.h"
#include "device.h"
#include "tile.cuh"

namespace octavo::cuda {
namespace {

int padded(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

bool fits_mma(DType dtype, KvType kv, int head_dim) {
    const int step = kv == KvType::kSame ? 8 : 16;
    return (dtype == DType::kF16 || dtype == DType::kBF16) && head_dim <= 256 && head_dim % step == 0;
}

KernelChoice choose_decode_mma(DType dtype, KvType kv, int head_dim, int rows) {
    const int dim = padded(head_dim), groups = rows > 8 && dim < 256 ? 2 : 1;
    if (dtype == DType::kF16) {
        return dim == 64    ? decode_mma_f16_64(kv, groups)
               : dim == 128 ? decode_mma_f16_128(kv, groups)
                            : decode_mma_f16_256(kv, groups);
    }
    return dim == 64    ? decode_mma_bf16_64(kv, groups)
           : dim == 128 ? decode_mma_bf16_128(kv, groups)
                        : decode_mma_bf16_256(kv, groups);
}

KernelChoice choose_prefill_mma(DType dtype, KvType kv, int head_dim) {
    const int dim = padded(head_dim);
    if (dtype == DType::kF16) {
        return dim == 64 ? prefill_mma_f16_64(kv) : dim == 128 ? prefill_mma_f16_128(kv) : prefill_mma_f16_256(kv);
    }
    return dim == 64 ? prefill_mma_bf16_64(kv) : dim == 128 ? prefill_mma_bf16_128(kv) : prefill_mma_bf16_256(kv);
}

KernelChoice choose(const std::string& name, DType dtype, KvType kv, int head_dim, int rows) {
    if (name == "simt") {
        require(head_dim <= 1024, "head_dim", "is over 1024");
        return attention_simt(dtype, kv, head_dim);
    }
    require(name == "decode_mma" || name == "prefill_mma", "kernel", "is none of decode_mma, prefill_mma, simt");
    require(fits_mma(dtype, kv, head_dim), "kernel", "does not take this type or head size: use simt");
    if (name == "decode_mma") {
        const KernelChoice few = choose_decode_mma(dtype, kv, head_dim, rows);
        if (fits_shared(few.shared_bytes)) {
            return few;  // else the tiles of prefill_mma, which every device has room for
        }
    }
    return choose_prefill_mma(dtype, kv, head_dim);
}

// A copy of what is there: 16 bytes need every row to lie at a multiple of 16.
void require_aligned(const KvCache& kv, const char* name) {
    for (const TensorRef* side : {&kv.keys, &kv.values}) {
        const std::int64_t size = size_of(side->dtype);
        bool aligned = reinterpret_cast<std::uintptr_t>(side->data) % 16 == 0;
        for (int i = 0; i < 3; ++i) {
            aligned = aligned && (side->shape[i] == 1 || side->stride[i] * size % 16 == 0);
        }
        require(aligned, name, "has rows that do not lie at multiples of 16 bytes");
    }
}

void check_sparse(const BlockSparse& sparse, std::int64_t heads) {
    require(sparse.vert_stride <= 1 || sparse.block_size > 0, "blocksparse_block_size", "is not positive");
    require(sparse.local_blocks >= 0, "blocksparse_local_blocks", "is negative");
    require(sparse.tp_rank >= 0, "tp_rank", "is negative");
    const std::int64_t step = std::abs(std::int64_t{sparse.head_sliding_step});
    require(volume({sparse.tp_rank + std::int64_t{1}, heads, step}) <= kMostInInt / 2, "blocksparse_head_sliding_step",
            "is too large");
}

void fill_score(ScoreParams& score, const Attention& a, std::int64_t heads) {
    require(std::isfinite(a.scale), "scale", "is not finite");
    require(std::isfinite(a.soft_cap) && a.soft_cap >= 0, "soft_cap", "is negative or not finite");
    require(a.window >= 0, "window", "is negative");
    check_sparse(a.sparse, heads);
    score.scale = a.scale;
    score.soft_cap = a.soft_cap;
    score.window = a.window;
    if (a.alibi.given()) {
        expect(a.alibi, "alibi_slopes", {heads}, DType::kF32);
    }
    if (a.sinks.given()) {
        expect(a.sinks, "sinks", {heads}, DType::kF32);
    }
    score.alibi = a.alibi.as<float>();
    score.sinks = a.sinks.as<float>();
    score.local_blocks = a.sparse.local_blocks;
    score.vert_stride = a.sparse.vert_stride;
    score.sparse_block = a.sparse.block_size;
    score.head_step = a.sparse.head_sliding_step;
    score.tp_rank = a.sparse.tp_rank;
}

}  // namespace

KvLayer make_params(AttentionParams& p, const TensorRef& out, const TensorRef& queries, const KvCache& kv,
                    const TensorRef& tables, const TensorRef& lens, const Attention& attention) {
    usable(queries, "query");
    require(queries.is_float(), "query", "is not of a float type");
    const KvLayer layer = make_kv_layer(kv, queries.dtype);
    expect(queries, "query", {kAny, kAny, layer.head_dim});
    expect(out, "out", {queries.shape[0], queries.shape[1], layer.head_dim}, queries.dtype);
    expect(tables, "block_tables", {kAny, kAny}, DType::kI32);
    expect(lens, "seq_lens", {tables.shape[0]}, DType::kI32);
    require(layer.num_heads > 0 && queries.shape[1] % layer.num_heads == 0, "query",
            "has a number of heads that is no multiple of the kv heads");
    p.out = out.data;
    p.queries = queries.data;
    expect_apart(out, "out",
                 {&queries, &kv.keys, &kv.values, &kv.key_scale, &kv.value_scale, &attention.alibi, &attention.sinks,
                  &tables, &lens});
    p.tables = tables.as<std::int32_t>();
    p.table_stride = tables.stride[0];
    p.lens = lens.as<std::int32_t>();
    p.out_row = out.stride[0];
    p.out_head = out.stride[1];
    p.query_row = queries.stride[0];
    p.query_head = queries.stride[1];
    p.whole_queries = whole_rows({&queries}, 2);
    p.kv = layer.pages;
    p.scales = layer.scales;
    fill_score(p.score, attention, queries.shape[1]);
    p.num_heads = static_cast<int>(queries.shape[1]);
    p.num_kv_heads = layer.num_heads;
    p.head_dim = layer.head_dim;
    p.group = p.num_heads / p.num_kv_heads;
    require(volume({queries.shape[0], p.group}) <= kMostInInt, "query", "has too many rows");
    p.num_tokens = static_cast<int>(queries.shape[0]);
    p.num_sequences = static_cast<int>(tables.shape[0]);
    p.max_keys = static_cast<int>(std::min(volume({tables.shape[1], p.kv.block_size}), std::int64_t{1} << 30));
    p.fault = fault_word();
    p.fp8 = fp8_constants(queries.dtype == DType::kBF16, layer.type);
    return layer;
}

namespace {

void fill_plan(AttentionParams& p, const PlanRef& plan, int rows) {
    expect(plan.slots, "plan.slots", {kAny}, DType::kI32);
    require(plan.slots.shape[0] > 0, "plan.slots", "is empty");
    expect(plan.items, "plan.items", {kAny, 8}, DType::kI32);
    expect_dense(plan.items, "plan.items");
    expect(plan.counters, "plan.counters", {kAny}, DType::kI32);
    require(plan.partials.dtype == DType::kF32 &&
                plan.partials.size() >= plan.counters.size() * rows * (std::int64_t{p.head_dim} + 2),
            "plan.partials", "does not hold rows * (head_dim + 2) float32 for each counter");
    expect_dense(plan.partials, "plan.partials");
    require(reinterpret_cast<std::uintptr_t>(plan.partials.data) % 16 == 0, "plan.partials",
            "does not lie at a multiple of 16 bytes");
    p.num_items = static_cast<int>(plan.items.shape[0]);
    p.num_partials = static_cast<int>(plan.counters.size());
    p.slots = plan.slots.as<std::int32_t>();
    p.items = reinterpret_cast<const plan::Item*>(plan.items.data);
    p.counters = plan.counters.as<std::int32_t>();
    p.partials = plan.partials.as<float>();
}

void start(const KernelChoice& choice, const AttentionParams& p, const PlanRef& plan, StreamHandle stream) {
    const auto slots = static_cast<unsigned>(plan.slots.shape[0] - 1);
    if (slots > 0) {
        launch(choice.kernel, dim3(slots), choice.threads, choice.shared_bytes, as_stream(stream), p);
    }
}

}  // namespace

KernelShape attention_kernel(const std::string& kernel, DType queries, const std::string& kv_type, int head_dim,
                             int rows) {
    const KernelChoice choice = choose(kernel, queries, kv_type_named(kv_type), head_dim, rows);
    require(fits_shared(choice.shared_bytes), "head_dim", "needs more shared memory than this device has");
    return {choice.rows, resident_blocks(choice.kernel, choice.threads, choice.shared_bytes)};
}

void paged_attention(const std::string& kernel, int rows, const TensorRef& out, const TensorRef& queries,
                     const KvCache& kv, const TensorRef& tables, const TensorRef& cu_q, const TensorRef& lens,
                     const PlanRef& plan, const Attention& attention, StreamHandle stream) {
    AttentionParams p{};
    const KvLayer layer = make_params(p, out, queries, kv, tables, lens, attention);
    expect(cu_q, "cu_q", {tables.shape[0] + 1}, DType::kI32);
    p.cu_q = cu_q.as<std::int32_t>();
    const KernelChoice choice = choose(kernel, queries.dtype, layer.type, layer.head_dim, rows);
    require(choice.rows == rows, "rows", "is not what attention_kernel said");
    fill_plan(p, plan, rows);
    expect_apart(out, "out", {&cu_q, &plan.slots, &plan.items, &plan.counters, &plan.partials});
    if (kernel != "simt") {
        require(layer.contiguous, "key_cache", "is xpack: use simt");
        require(layer.pages.block_size % 8 == 0, "key_cache", "has a block size that is no multiple of 8: use simt");
        require_aligned(kv, "key_cache");
        for (const TensorRef* scale : {&kv.key_scale, &kv.value_scale}) {
            require(scale->ndim != 3 || whole_rows({scale}, 2), scale == &kv.key_scale ? "k_scale" : "v_scale",
                    "has rows that do not lie at multiples of 16 bytes: use simt");
        }
    }
    start(choice, p, plan, stream);
}

}  // namespace octavo::cuda
