#include "octavo/llama.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "activations.h"
#include "llama_run.h"
#include "octavo/lora_room.h"

namespace octavo {
namespace {

// The pages of some heads of a cache.
KvPages of_heads(KvPages pages, const Span& heads) {
    for (KvSide* side : {&pages.keys, &pages.values}) {
        side->data += heads.first * side->head * size_of(pages.dtype);
        side->scales += side->scales == nullptr ? 0 : heads.first * side->per_head;
        side->slot_scales += side->slot_scales == nullptr ? 0 : heads.first * side->slot_scale_head;
    }
    pages.num_heads = heads.count;
    return pages;
}

LlamaShare all_of(const LlamaSizes& sizes) {
    LlamaShare all;
    all.kv_heads = {0, sizes.kv_heads};
    all.hidden = {0, sizes.hidden};
    all.inner = {0, sizes.inner};
    all.vocab = {0, sizes.vocab};
    return all;
}

}  // namespace

Llama::Llama(const LlamaSizes& sizes, const Weight& embedding, const Weight& head, const TensorRef& norm,
             const TensorRef& cos, const TensorRef& sin, std::vector<LlamaLayer> layers, const LlamaShare& share)
    : sizes_(sizes),
      share_(share.team != nullptr ? share : all_of(sizes)),
      embedding_(embedding),
      head_(head),
      norm_(norm),
      cos_(cos),
      sin_(sin),
      layers_(std::move(layers)),
      space_(new Workspace) {
    check_model();
    for (Part& part : space_->parts) {
        for (const LlamaLayer& layer : layers_) {
            part.plans[layer.window];
        }
    }
    if (share_.hosts != nullptr) {
        for (const Span& heads : share_.hosts->kv_heads()) {
            const std::int64_t d = sizes_.head_dim, queries = group() * d;
            host_attended_.push_back({heads.first * queries, heads.count * queries});
            host_keys_.push_back({heads.first * d, heads.count * d});
        }
    }
    if (share_.team != nullptr) {
        room_ = std::make_unique<TeamRoom>(*share_.team, sizes_, share_.tokens, share_.plan_bytes);
        if (share_.loras != nullptr && share_.hosts != nullptr) {
            share_.hosts->keep_adapters(share_.loras->memory());
        }
    }
}

Llama::~Llama() = default;

Span Llama::queries() const {
    const Span& kv = share_.kv_heads;
    return shares_attention() ? share_.heads[0] : Span{kv.first * group(), kv.count * group()};
}

// Where ranks have whole KV heads each, all of a host have equally many.
bool Llama::all_have_heads() const {
    return !shares_attention() || share_.kv_heads.count * (group() + 2) >= share_.team->stage_size();
}

std::int64_t Llama::qkv_rows() const {
    const LatentSizes& latent = sizes_.latent;
    if (latent.rank == 0) {
        return (queries().count + keys().count + values().count) * sizes_.head_dim;
    }
    return (latent.query_rank > 0 ? latent.query_rank : sizes_.heads * (latent.rotated + latent.plain)) +
           sizes_.head_dim;
}

bool Llama::normed_together(const LlamaLayer& layer) const {
    return layer.q_norm.given() && layer.q_norm.ndim == 1 && layer.q_norm.shape[0] != sizes_.head_dim;
}

void Llama::forward(const TensorRef& hidden, const LlamaStep& step, const std::vector<KvCache>& kv) {
    std::vector<KvPages>& layers = space_->layers;
    layers.clear();
    for (const KvCache& layer : kv) {
        layers.push_back(kv_pages(layer, sizes_.head_dim));
    }
    check(hidden, step, layers);
    for (const KvCache& layer : kv) {
        expect_apart(layer, "kv", {&hidden, &step.token_ids, &step.positions, &step.slots, &step.rows});
        expect_apart(layer, "kv", {&step.batch.cu_q, &step.batch.seq_lens, &step.batch.tables});
    }
    if (room_ != nullptr) {
        order_forward(step);
        tell_order();
        share_.team->meet_all();
        run(hidden, own_step(step, room_->step().lora_groups), layers);
    } else {
        run(hidden, step, layers);
    }
    if (room_ != nullptr && share_.team->broken()) {
        throw std::runtime_error(share_.team->trouble());
    }
}

void Llama::run(const TensorRef& hidden, const LlamaStep& step, const std::vector<KvPages>& kv) {
    space_->own.clear();
    for (const KvPages& layer : kv) {
        space_->own.push_back(of_heads(layer, share_.kv_heads));
    }
    const LlamaSizes& s = sizes_;
    const std::int64_t n = step.token_ids.shape[0], alone = room_ == nullptr ? n : 0;
    const std::int64_t widest = TeamRoom::widest(s);
    PlanShare among;
    if (shares_attention()) {
        among = {share_.team->rank_in_stage(), share_.team->stage_size()};
    }
    space_->x.take(alone * s.hidden);
    space_->apart.take(s.sums_apart() ? alone * s.hidden : 0);
    space_->normed.take(n * s.hidden);
    space_->qkv.take(n * results_apart(qkv_rows()));
    space_->attended.take(alone * s.attended());
    space_->gate_up.take(n * results_apart(2 * share_.inner.count));
    space_->inner.take(alone * s.inner);
    space_->low.take(step.loras.empty() ? 0 : step.lora_rows.shape[0] * lora_low_rows(step));
    const std::int64_t adapted = step.loras.empty() ? 0 : n;
    std::fill_n(space_->low_rank.take(adapted), adapted, LowRank{nullptr, 0, nullptr});
    space_->digits.take(num_blocks(n, widest));
    space_->bf16.take(num_blocks(n, widest));
    for (const LlamaLayer& layer : layers_) {
        if (!layer.experts.router.empty()) {
            space_->experts.take(layer.experts, expert_part(layer.experts, share_), s.hidden, n);
        }
    }
    if (s.latent.rank > 0) {
        space_->take_latents(s, n);
        space_->latent_groups = latent_groups(step.batch.seq_lens.shape[0]);
    }
    const std::int64_t parts = is_staged() ? std::min(kParts, n) : 1;
    for (std::int64_t i = 0; i < parts; ++i) {
        Part& part = space_->parts[i];
        if (parts > 1) {
            part.cut(step, i * n / parts, (i + 1) * n / parts);
        } else {
            part.step = step;
            part.first = 0;
        }
        for (auto& [window, plan] : part.plans) {
            const std::int64_t heads = share_.kv_heads.count * space_->latent_groups;
            plan.build(part.step.batch, heads, group() / space_->latent_groups, s.head_dim, window, among);
        }
    }
    Pool& pool = Pool::instance();
    const int threads = pool.size();
    pool.run([&](PoolThread& thread) {
        for (std::int64_t i = 0; i < parts; ++i) {
            Run(*this, space_->parts[i], kv, thread, threads)();
        }
        Run whole(*this, space_->parts[0], kv, thread, threads);
        whole.end_step(step, parts);
        if (hidden.given()) {  // some row is wanted
            whole.take_rows(hidden);
        }
    });
}

// Logits of the own tokens of the vocabulary.
void Llama::linear_logits(const TensorRef& out, const TensorRef& hidden) const {
    linear(out, hidden, head_, TensorRef{});
    if (sizes_.logit_cap == 0 && sizes_.logit_divisor == 1.0F) {
        return;
    }
    const std::int64_t cols = out.shape[1], pieces = (cols + kPiece - 1) / kPiece;
    Pool::instance().run([&](PoolThread& thread) {
        thread.each(out.shape[0] * pieces, [&](std::int64_t i) {
            const std::int64_t from = i % pieces * kPiece, count = std::min(kPiece, cols - from);
            float* some = out.as<float>() + i / pieces * out.stride[0] + from;
            for (std::int64_t j = 0; sizes_.logit_divisor != 1.0F && j < count; ++j) {
                some[j] /= sizes_.logit_divisor;
            }
            if (sizes_.logit_cap > 0) {
                soft_cap(some, sizes_.logit_cap, count);
            }
        });
    });
}

}  // namespace octavo
