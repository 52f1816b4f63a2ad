// What a decoder of the Llama family refuses.
#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include "attention.h"
#include "experts.h"
#include "lora.h"
#include "octavo/check.h"
#include "octavo/llama.h"

namespace octavo {
namespace {

constexpr std::int64_t kMostSize = std::int64_t{1} << 30;  // of anything: two of them multiply within 64 bits

void expect_vector(const TensorRef& tensor, const char* name, std::int64_t size, bool optional = false) {
    if (!optional || tensor.given()) {
        expect(tensor, name, {size}, DType::kF32);
    }
}

void expect_weight(const Weight& weight, const char* name, std::int64_t rows, std::int64_t cols) {
    require(weight.data != nullptr && weight.rows == rows && weight.cols == cols, name, "has another shape");
}

void expect_stack(const Stack& stack, const char* name, std::int64_t rows, std::int64_t cols) {
    std::int64_t found = 0;
    for (const Weight& part : stack) {
        require(part.data != nullptr && part.cols == cols && part.rows <= rows - found, name, "has another shape");
        require(part.rounding == stack.front().rounding, name, "has parts that round their inputs differently");
        found += part.rows;
    }
    require(found == rows, name, "has another shape");
}

void expect_ids(const TensorRef& ids, const char* name, std::int64_t low, std::int64_t end) {
    for (std::int64_t i = 0; i < ids.shape[0]; ++i) {
        const std::int64_t id = ids.as<std::int64_t>()[i];
        require(id >= low && id < end, name, "is out of range");
    }
}

}  // namespace

void Llama::check_model() const {
    const LlamaSizes& s = sizes_;
    for (const std::int64_t size : {s.vocab, s.hidden, s.inner, s.heads, s.kv_heads, s.head_dim}) {
        require(size > 0 && size <= kMostSize, "sizes", "are not positive, or no model's");
    }
    require(s.heads % s.kv_heads == 0, "sizes", "have heads that do not share key-value heads");
    for (const float scale : {s.embedding_scale, s.sum_scale, s.attention_cap, s.logit_cap, s.logit_divisor}) {
        require(std::isfinite(scale), "sizes", "have a scale, a cap or a divisor that is not finite");
    }
    require(s.attention_cap >= 0 && s.logit_cap >= 0 && s.logit_divisor != 0, "sizes",
            "have a negative cap, or divide logits by 0");
    expect_weight(embedding_, "embedding", s.vocab, s.hidden);
    require(s.asked_inner >= 0 && s.asked_inner <= kMostSize, "sizes", "are no model's");
    for (const auto& [own, all] : {std::pair{share_.kv_heads, s.kv_heads}, std::pair{share_.hidden, s.hidden},
                                   std::pair{share_.inner, s.inner}, std::pair{share_.vocab, s.vocab}}) {
        require(own.within(all), "share", "is not one of this model");
    }
    if (share_.team != nullptr) {
        const auto layers = static_cast<std::int64_t>(layers_.size());
        require(
            share_.layers.first >= 0 && share_.layers.count >= 0 && share_.layers.first + share_.layers.count <= layers,
            "share", "has layers that this model has not");
        check_hosts();
    }
    check_heads();
    check_latents();
    const std::int64_t own_hidden = share_.hidden.count, qkv_rows = this->qkv_rows();
    expect_weight(head_, "head", share_.vocab.count, s.hidden);
    expect_vector(norm_, "norm", s.hidden);
    expect(cos_, "cos", {kAny, kAny}, DType::kF32);
    expect(sin_, "sin", {cos_.shape[0], cos_.shape[1]}, DType::kF32);
    require(cos_.shape[1] % 2 == 0 && cos_.shape[1] <= s.head_dim, "cos", "has another width than a head");
    for (const LlamaLayer& layer : layers_) {
        expect_vector(layer.input_norm, "input_norm", s.hidden, s.post_norms);
        expect_vector(layer.mlp_norm, "mlp_norm", s.hidden, s.post_norms);
        require(layer.attended_norm.given() == s.post_norms && layer.output_norm.given() == s.post_norms, "post_norms",
                "are not the norms that layers have");
        expect_vector(layer.attended_norm, "attended_norm", s.hidden, true);
        expect_vector(layer.output_norm, "output_norm", s.hidden, true);
        require(layer.cos.given() == layer.sin.given(), "cos", "is of a layer without sin, or has none of its own");
        if (layer.cos.given()) {
            expect(layer.cos, "cos", {cos_.shape[0], cos_.shape[1]}, DType::kF32);
            expect(layer.sin, "sin", {cos_.shape[0], cos_.shape[1]}, DType::kF32);
        }
        expect_stack(layer.qkv, "qkv", qkv_rows, s.hidden);
        expect_stack(layer.out, "out", own_hidden, s.attended());
        check_experts_share(layer.experts);
        if (layer.experts.router.empty()) {
            expect_stack(layer.gate_up, "gate_up", 2 * share_.inner.count, s.hidden);
            expect_stack(layer.down, "down", own_hidden, s.inner);
        }
        expect_vector(layer.qkv_bias, "qkv_bias", qkv_rows, true);
        expect_vector(layer.out_bias, "out_bias", own_hidden, true);
        expect_vector(layer.gate_up_bias, "gate_up_bias", 2 * share_.inner.count, true);
        expect_vector(layer.down_bias, "down_bias", own_hidden, true);
        s.latent.rank > 0 ? check_latent(layer) : check_head_norms(layer);
        expect_vector(layer.sinks, "sinks", s.heads, true);
        require(layer.window >= 0, "window", "is negative");
        check_sparse(layer.sparse, s.heads);
    }
}

// The rank's part is one of this layer's experts, and what a token asks of them has room in the team's memory.
void Llama::check_experts_share(const Experts& experts) const {
    check_experts(experts, expert_part(experts, share_), sizes_.hidden);
    require(experts.router.empty() || !sizes_.sums_apart(), "router", "is of a model whose sums lie apart");
    if (share_.team != nullptr && !experts.router.empty()) {
        const std::int64_t inner = expert_inner(experts), shared = shared_inner(experts);
        require(share_.expert_inner.within(inner) && share_.shared_inner.within(shared), "share",
                "is not one of this model");
        for (std::size_t host = 0; host < share_.host_expert_inner.size(); ++host) {
            require(share_.host_expert_inner[host].within(inner) && share_.host_shared_inner[host].within(shared),
                    "share", "is not one of this model");
        }
        require(inner <= kMostSize && shared <= kMostSize && experts.top * inner + shared <= sizes_.asked_inner,
                "sizes", "have too small an asked_inner");
    }
}

// One process computes them, and what a page holds of a token is what they say.
void Llama::check_latents() const {
    const LatentSizes& latent = sizes_.latent;
    for (const std::int64_t size : {latent.rank, latent.query_rank, latent.rotated, latent.plain, latent.values}) {
        require(size >= 0 && size <= kMostSize, "latent", "has a size that is negative, or no model's");
    }
    if (latent.rank > 0) {
        require(latent.plain > 0 && latent.values > 0 && std::isfinite(latent.eps), "latent",
                "has a size that is not positive");
        require(sizes_.kv_heads == 1 && sizes_.head_dim == latent.rotated + latent.rank, "latent",
                "is not what a page holds of a token");
        require(cos_.ndim == 2 && cos_.shape[1] == latent.rotated, "latent", "has other angles than queries");
        require(share_.team == nullptr, "latent", "is of a model that no group divides");
    }
}

void Llama::check_latent(const LlamaLayer& layer) const {
    const LatentSizes& latent = sizes_.latent;
    const std::int64_t heads = sizes_.heads;
    expect_stack(layer.queries, "queries", latent.query_rank > 0 ? heads * (latent.rotated + latent.plain) : 0,
                 latent.query_rank);
    const auto expect_heads = [heads](const Stack& stack, const char* name, std::int64_t rows, std::int64_t cols) {
        require(stack.size() == 1, name, "is not one matrix");
        expect_stack(stack, name, heads * rows, cols);
        require(!stack.front().packed() || rows % kGroupRows == 0, name, "has heads that are not whole groups of rows");
    };
    expect_heads(layer.latent_keys, "latent_keys", latent.rank, latent.plain);
    expect_heads(layer.latent_values, "latent_values", latent.values, latent.rank);
    expect_vector(layer.q_norm, "q_norm", latent.query_rank, latent.query_rank == 0);
    expect_vector(layer.k_norm, "k_norm", latent.rank);
    require(layer.window == 0 && layer.rotated && !layer.sinks.given() && !layer.cos.given(), "latent",
            "is of a layer with a window, with sinks or with angles of its own");
}

// Both for a head, or both for all heads together.
void Llama::check_head_norms(const LlamaLayer& layer) const {
    const bool together = normed_together(layer);
    expect_vector(layer.q_norm, "q_norm", together ? sizes_.heads * sizes_.head_dim : sizes_.head_dim, true);
    expect_vector(layer.k_norm, "k_norm", together ? sizes_.kv_heads * sizes_.head_dim : sizes_.head_dim, !together);
}

// Heads of products are those whose attention the ranks of this host share.
void Llama::check_heads() const {
    const Span& kv = share_.kv_heads;
    const auto in = [](const Span& own, std::int64_t first, std::int64_t count) {
        return own.first >= first && Span{own.first - first, own.count}.within(count);
    };
    require(
        share_.heads.empty() || (share_.team != nullptr && share_.heads.size() == 3 &&
                                 in(share_.heads[0], kv.first * group(), kv.count * group()) &&
                                 in(share_.heads[1], kv.first, kv.count) && in(share_.heads[2], kv.first, kv.count)),
        "share", "has heads that are not those of its host");
}

// The spans of hosts are there, and the own ones lie within that of this host.
void Llama::check_hosts() const {
    const LlamaShare& share = share_;
    const std::size_t hosts = share.hosts == nullptr ? 0 : static_cast<std::size_t>(share.hosts->size());
    const std::vector<Span> none, &kv_heads = share.hosts == nullptr ? none : share.hosts->kv_heads();
    const LlamaSizes& s = sizes_;
    for (const auto& [own, spans, all] :
         {std::tuple{share.kv_heads, &kv_heads, s.kv_heads}, std::tuple{share.hidden, &share.host_hidden, s.hidden},
          std::tuple{share.inner, &share.host_inner, s.inner}, std::tuple{share.vocab, &share.host_vocab, s.vocab},
          std::tuple{share.expert_inner, &share.host_expert_inner, s.asked_inner},
          std::tuple{share.shared_inner, &share.host_shared_inner, s.asked_inner}}) {
        require(spans->size() == hosts, "share", "has no span for each host");
        for (const Span& span : *spans) {
            require(span.within(all), "share", "is not one of this model");
        }
        if (hosts > 0) {
            const Span& here = (*spans)[static_cast<std::size_t>(share.hosts->host())];
            require(own.first >= here.first && own.first + own.count <= here.first + here.count, "share",
                    "is not in that of its host");
        }
    }
    if (hosts > 0) {
        const std::vector<Span>& layers = share.hosts->layers();
        const Span& here = layers[static_cast<std::size_t>(share.hosts->host())];
        require(layers.back().first + layers.back().count == static_cast<std::int64_t>(layers_.size()) &&
                    share.layers.first >= here.first &&
                    share.layers.first + share.layers.count <= here.first + here.count,
                "share", "has layers that are not in those of its host");
    }
}

void Llama::check(const TensorRef& hidden, const LlamaStep& step, const std::vector<KvPages>& kv) const {
    const std::int64_t num_tokens = step.token_ids.shape[0];
    require(kv.size() == layers_.size(), "kv", "has another number of layers");
    for (const KvPages& layer : kv) {
        require(layer.num_blocks == kv[0].num_blocks && layer.block_size == kv[0].block_size &&
                    layer.num_heads == sizes_.kv_heads,
                "kv", "has layers of different forms, or another number of heads");
        attention_job(layer, sizes_.heads);
    }
    expect(step.token_ids, "token_ids", {num_tokens}, DType::kI64);
    expect(step.positions, "positions", {num_tokens}, DType::kI64);
    expect(step.slots, "slots", {num_tokens}, DType::kI64);
    expect(step.rows, "rows", {kAny}, DType::kI64);
    expect(hidden, "hidden", {step.rows.shape[0], sizes_.hidden}, DType::kF32);
    expect_ids(step.token_ids, "token_ids", 0, sizes_.vocab);
    expect_ids(step.positions, "positions", 0, cos_.shape[0]);
    expect_ids(step.slots, "slots", -1, kv.empty() ? 0 : kv[0].num_blocks * kv[0].block_size);
    expect_ids(step.rows, "rows", 0, num_tokens);
    check_lora_rows(step, num_tokens);
    check_pictures(step.pictures, num_tokens);
    for (const LoraGroup& group : step.loras) {
        check_lora(*group.lora);
    }
    if (!kv.empty()) {
        check_batch(step.batch, num_tokens, kv[0].num_blocks, kv[0].block_size);
    }
    const auto& [cu_q, seq_lens, tables, starts] = step.batch;
    expect_apart(hidden, "hidden",
                 {&step.token_ids, &step.positions, &step.slots, &step.rows, &cu_q, &seq_lens, &tables, &starts});
}

void Llama::check_pictures(const LlamaPictures& pictures, std::int64_t num_tokens) const {
    const auto& [rows, states, cos, sin] = pictures;
    require(cos.given() == sin.given() && (cos.given() || !rows.given()), "picture_cos",
            "is not given with picture_sin and picture_rows");
    if (!cos.given()) {
        return;
    }
    expect(cos, "picture_cos", {num_tokens, cos_.shape[1]}, DType::kF32);
    expect(sin, "picture_sin", {num_tokens, cos_.shape[1]}, DType::kF32);
    require(share_.team == nullptr && sizes_.latent.rank == 0 && !sizes_.sums_apart(), "picture_cos",
            "is of a group, or of a model whose pictures are not read");
    for (const LlamaLayer& layer : layers_) {
        require(!layer.cos.given(), "picture_cos", "is of a model with layers that have angles of their own");
    }
    if (!rows.given()) {
        return;
    }
    expect(rows, "picture_rows", {kAny}, DType::kI64);
    expect(states, "picture_states", {rows.shape[0], kAny}, DType::kF32);
    const std::int64_t times = states.shape[1] / sizes_.hidden;
    require(times >= 1 && times - 1 <= static_cast<std::int64_t>(layers_.size()) &&
                times * sizes_.hidden == states.shape[1],
            "picture_states", "have another width than hidden states, or than some of them");
    std::int64_t before = -1;
    for (std::int64_t i = 0; i < rows.shape[0]; ++i) {
        const std::int64_t row = rows.as<std::int64_t>()[i];
        require(row > before && row < num_tokens, "picture_rows", "is out of range, or not in order");
        before = row;
    }
}

}  // namespace octavo
