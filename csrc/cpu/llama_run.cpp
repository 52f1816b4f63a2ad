// A step of a decoder in one thread, from the embeddings to the states of its rows.
#include "llama_run.h"

#include <algorithm>

namespace octavo {

Llama::Run::Run(Llama& model, Part& part, const std::vector<KvPages>& kv, PoolThread& thread, int threads)
    : m_(model),
      s_(model.sizes_),
      share_(model.share_),
      part_(part),
      step_(part.step),
      kv_(kv),
      thread_(thread),
      threads_(threads),
      k_(kernels()) {
    num_tokens_ = step_.token_ids.shape[0];
    Workspace& space = *model.space_;
    const TeamRoom* room = model.room_.get();
    x_ = (room != nullptr ? room->x : space.x.take(0)) + part.first * s_.hidden;
    apart_ = (room != nullptr ? room->apart : space.apart.take(0)) + part.first * s_.hidden;
    sum_ = s_.sums_apart() ? apart_ : x_;
    attended_ = (room != nullptr ? room->attended : space.attended.take(0)) + part.first * s_.attended();
    inner_ = (room != nullptr ? room->inner : space.inner.take(0)) + part.first * TeamRoom::inner_of(s_);
    queries_ = room != nullptr ? room->queries + part.first * s_.heads * s_.head_dim : nullptr;
    keys_ = room != nullptr ? room->keys + part.first * s_.kv_heads * s_.head_dim : nullptr;
    own_ = {model.queries(), model.keys(), model.values()};
    qkv_ = space.qkv.take(0);
    gate_up_ = space.gate_up.take(0);
    low_ = space.low.take(0);
    low_rows_ = lora_low_rows(step_);
    low_rank_ = space.low_rank.take(0) + part.first;
}

void Llama::Run::operator()() {
    begin();
    const auto first = static_cast<std::size_t>(share_.layers.first);
    const std::size_t end =
        share_.team == nullptr ? m_.layers_.size() : first + static_cast<std::size_t>(share_.layers.count);
    for (std::size_t index = first; index < end; ++index) {
        const LlamaLayer& layer = m_.layers_[index];
        s_.latent.rank > 0 ? attend_latents(index) : attend_heads(index);
        round(layer.out, attended_);
        add_product(index, &LoraLayer::out, layer.out, attended_, layer.out_bias);
        end_sum(layer.attended_norm);
        layer.experts.router.empty() ? run_mlp(index) : ask_experts(layer);
        show_after(index);
    }
    if (late_ != nullptr) {
        each(num_tokens_, [&](std::int64_t t) { add_apart(t, *late_); });
        late_ = nullptr;
    }
    if (stages() > 1) {
        thread_.each(share_.team->rank_in_stage() == 0, [&](std::int64_t) { share_.team->pass_on(); });
    } else if (m_.speaks() && share_.hosts->after() >= 0) {
        thread_.each(1, [&](std::int64_t) { share_.hosts->send_states(m_.states(part_.first, num_tokens_)); });
    }
}

void Llama::Run::end_step(const LlamaStep& step, std::int64_t parts) {
    if (m_.speaks()) {
        const TensorRef states = m_.states(0, step.token_ids.shape[0]);
        thread_.each(1, [&](std::int64_t) { share_.hosts->end_step(step, parts, kv_, states); });
    } else if (stages() > 1 && share_.team->rank() == 0) {
        thread_.each(1, [&](std::int64_t) { share_.team->wait_for_end(); });
    }
}

void Llama::Run::take_rows(const TensorRef& hidden) {
    const float* x = x_ - part_.first * s_.hidden;
    each(step_.rows.shape[0], [&](std::int64_t i) {
        const float* from = x + step_.rows.as<std::int64_t>()[i] * s_.hidden;
        k_.rms_norm(from, m_.norm_.as<float>(), s_.eps, s_.hidden, hidden.as<float>() + i * hidden.stride[0]);
    });
}

void Llama::Run::begin() {
    if (stages() > 1) {
        thread_.each(1, [&](std::int64_t) { share_.team->wait_for_part(); });
    }
    if (share_.team != nullptr && share_.team->stage() > 0) {
        return;
    }
    if (share_.hosts != nullptr && share_.hosts->before() >= 0) {
        const TensorRef states = m_.states(part_.first, num_tokens_);
        thread_.each(m_.speaks(), [&](std::int64_t) { share_.hosts->receive_states(states); });
    } else {
        const std::int64_t rank = share_.team != nullptr ? share_.team->rank_in_stage() : 0;
        const std::int64_t ranks = share_.team != nullptr ? share_.team->stage_size() : 1;
        each((num_tokens_ - rank + ranks - 1) / ranks, [&](std::int64_t i) {
            const std::int64_t t = i * ranks + rank;
            float* x = x_ + t * s_.hidden;
            if (const float* states = shown(t)) {
                std::copy_n(states, s_.hidden, x);
                return;
            }
            k_.weight_row(m_.embedding_, step_.token_ids.as<std::int64_t>()[t], x);
            for (std::int64_t j = 0; s_.embedding_scale != 1.0F && j < s_.hidden; ++j) {
                x[j] *= s_.embedding_scale;
            }
        });
    }
    meet();
}

const float* Llama::Run::shown(std::int64_t t) const {
    const auto& [rows, states, cos, sin] = step_.pictures;
    if (!rows.given()) {
        return nullptr;
    }
    const auto *first = rows.as<std::int64_t>(), *end = first + rows.shape[0], *found = std::lower_bound(first, end, t);
    return found != end && *found == t ? states.as<float>() + (found - first) * states.stride[0] : nullptr;
}

void Llama::Run::show_after(std::size_t index) {
    const auto& [rows, states, cos, sin] = step_.pictures;
    const std::int64_t first = (static_cast<std::int64_t>(index) + 1) * s_.hidden;
    each(rows.given() && first < states.shape[1] ? rows.shape[0] : 0, [&](std::int64_t i) {
        float* x = x_ + rows.as<std::int64_t>()[i] * s_.hidden;
        const float* more = states.as<float>() + i * states.stride[0] + first;
        for (std::int64_t j = 0; j < s_.hidden; ++j) {
            x[j] += more[j];
        }
    });
}

void Llama::Run::meet(std::initializer_list<Columns> columns) {
    if (share_.team != nullptr) {
        thread_.each(1, [&](std::int64_t) {
            share_.team->meet_in_step();
            if (share_.hosts != nullptr && share_.hosts->peers() > 1 && columns.size() > 0) {
                if (share_.team->rank() == 0) {
                    share_.hosts->exchange(columns);
                }
                share_.team->meet_in_step();
            }
        });
    }
}

}  // namespace octavo
