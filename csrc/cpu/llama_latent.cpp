// Latent attention: pages have one head, whose vector is the key and the value of all heads of a query. It is what is
// rotated of a key, and then the latent. A head's matrix of keys is multiplied with its query, and its matrix of values
// with what attention gives.
#include <algorithm>

#include "llama_run.h"
#include "rope.h"

namespace octavo {
namespace {

// The rows of one of the heads that a matrix has below each other.
Weight of_head(Weight weight, std::int64_t heads, std::int64_t head) {
    weight.rows /= heads;
    const std::int64_t row = weight.packed() ? row_bytes(weight) : weight.stride * plain_bytes(weight.format);
    weight.data = static_cast<const char*>(weight.data) + head * weight.rows * row;
    return weight;
}

// The pages as those of several heads that are one and the same, with values that are keys.
KvPages shared_by(KvPages pages, std::int64_t groups) {
    pages.keys.head = 0;
    pages.keys.per_head = 0;
    pages.keys.slot_scale_head = 0;
    pages.values = pages.keys;
    pages.num_heads = groups;
    return pages;
}

}  // namespace

void Llama::Workspace::take_latents(const LlamaSizes& sizes, std::int64_t num_tokens) {
    const LatentSizes& latent = sizes.latent;
    const std::int64_t n = num_tokens, blocks = num_blocks(n, std::max(latent.plain, latent.rank));
    low_queries.take(n * latent.query_rank);
    plain_queries.take(latent.query_rank > 0 ? n * results_apart(sizes.heads * (latent.rotated + latent.plain)) : 0);
    latent_queries.take(n * sizes.heads * sizes.head_dim);
    head_digits.take(sizes.heads * blocks);
    head_bf16.take(sizes.heads * blocks);
}

std::int64_t Llama::latent_groups(std::int64_t sequences) const {
    const std::int64_t some = std::max<std::int64_t>(1, sequences);
    std::int64_t groups = std::min((Pool::instance().size() + some - 1) / some, sizes_.heads);
    while (sizes_.heads % groups != 0) {
        ++groups;
    }
    return groups;
}

void Llama::Run::attend_latents(std::size_t index) {
    const LlamaLayer& layer = m_.layers_[index];
    const LatentSizes& sizes = s_.latent;
    const KvPages& kv = m_.space_->own[index];
    norm(layer.input_norm, layer.qkv);
    product(layer.qkv, normed_, layer.qkv_bias, qkv_, qkv_row(), false);
    const HeadRows queries = make_queries(layer), plain{queries.data + sizes.rotated, queries.token, queries.head};
    const HeadRows asking{m_.space_->latent_queries.take(0), s_.heads * s_.head_dim, s_.head_dim};
    const HeadRows latents{asking.data + sizes.rotated, asking.token, asking.head};
    place_latents(layer, kv, queries, asking);
    round_heads(layer.latent_keys.front(), plain);
    multiply_heads(layer.latent_keys.front(), plain, latents);
    AttentionJob job = attention_job(shared_by(kv, m_.space_->latent_groups), s_.heads);
    job.out = asking.data;
    job.queries = asking.data;
    job.query_token = job.out_token = asking.token;
    job.query_head = job.out_head = asking.head;
    job.scale = s_.scale;
    job.soft_cap = s_.attention_cap;
    part_.plans.at(layer.window).run(thread_, job);
    round_heads(layer.latent_values.front(), latents);
    multiply_heads(layer.latent_values.front(), latents, {attended_, s_.attended(), sizes.values});
}

Llama::Run::HeadRows Llama::Run::make_queries(const LlamaLayer& layer) {
    const LatentSizes& sizes = s_.latent;
    const std::int64_t rank = sizes.query_rank, size = sizes.rotated + sizes.plain,
                       row = results_apart(s_.heads * size);
    if (rank == 0) {
        return {qkv_, qkv_row(), size};
    }
    float *low = m_.space_->low_queries.take(0), *queries = m_.space_->plain_queries.take(0);
    each(num_tokens_, [&](std::int64_t t) {
        k_.rms_norm(qkv_ + t * qkv_row(), layer.q_norm.as<float>(), sizes.eps, rank, low + t * rank);
        round_inputs(layer.queries.front(), low + t * rank, t, 0, rank, inputs_);
    });
    product(layer.queries, low, TensorRef{}, queries, row, false);
    return {queries, row, size};
}

void Llama::Run::place_latents(const LlamaLayer& layer, const KvPages& kv, const HeadRows& queries,
                               const HeadRows& asking) {
    const std::int64_t rotated = s_.latent.rotated, all = s_.heads + 1, size = kv.block_size;
    const std::int64_t first = m_.qkv_rows() - s_.head_dim;
    each(num_tokens_ * all, [&](std::int64_t i) {
        const std::int64_t t = i / all, h = i % all, position = step_.positions.as<std::int64_t>()[t];
        const Rope rope{m_.cos_.as<float>() + position * m_.cos_.stride[0],
                        m_.sin_.as<float>() + position * m_.sin_.stride[0], rotated / 2, false};
        float* space = thread_.scratch(rotated);
        if (h < s_.heads) {
            float* query = queries.data + t * queries.token + h * queries.head;
            turn(k_, rope, query, space);
            std::copy_n(query, rotated, asking.data + t * asking.token + h * asking.head);
            return;
        }
        float *key = qkv_ + t * qkv_row() + first, *latent = key + rotated;
        k_.rms_norm(latent, layer.k_norm.as<float>(), s_.latent.eps, s_.latent.rank, latent);
        turn(k_, rope, key, space);
        const std::int64_t slot = step_.slots.as<std::int64_t>()[t];
        for (const KvSide* side : {&kv.keys, &kv.values}) {
            if (slot >= 0) {
                k_.write_slot(kv, *side, slot / size, 0, slot % size, key);
            }
        }
    });
}

Inputs Llama::Run::inputs_of_head(const Weight& weight, std::int64_t head) const {
    const std::int64_t first = head * num_blocks(num_tokens_, weight.cols);
    return {m_.space_->head_digits.take(0) + first, m_.space_->head_bf16.take(0) + first};
}

void Llama::Run::round_heads(const Weight& weight, const HeadRows& x) {
    each(weight.rounding != Rounding::kNone ? num_tokens_ * s_.heads : 0, [&](std::int64_t i) {
        const std::int64_t t = i / s_.heads, h = i % s_.heads;
        round_inputs(weight, x.data + t * x.token + h * x.head, t, 0, weight.cols, inputs_of_head(weight, h));
    });
}

void Llama::Run::multiply_heads(const Weight& weight, const HeadRows& x, const HeadRows& y) {
    if (num_tokens_ == 0) {
        return;
    }
    const Weight one = of_head(weight, s_.heads, 0);
    const Division by = k_.division(one, num_tokens_);
    const std::int64_t slabs = (num_tokens_ + by.columns - 1) / by.columns;
    const std::int64_t some = rows_at_once(one, threads_, by, slabs * s_.heads), turns = (one.rows + some - 1) / some;
    thread_.each(s_.heads * slabs * turns, [&](std::int64_t i) {
        const std::int64_t head = i / turns / slabs, column = i / turns % slabs * by.columns, row = i % turns * some;
        const Inputs inputs = inputs_of_head(weight, head);
        const LinearJob whole{of_head(weight, s_.heads, head),
                              x.data + head * x.head,
                              x.token,
                              inputs.digits,
                              inputs.bf16,
                              num_tokens_,
                              y.data + head * y.head,
                              y.token,
                              nullptr,
                              false};
        const LinearJob slab = some_columns(whole, column, std::min(by.columns, num_tokens_ - column));
        k_.linear(slab, row, std::min(row + some, one.rows), thread_.scratch(k_.linear_scratch(slab)));
    });
}

}  // namespace octavo
