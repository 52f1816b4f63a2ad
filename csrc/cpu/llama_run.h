// What a step of a decoder is in one thread: its phases, one after the other.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "activations.h"
#include "buffer.h"
#include "experts.h"
#include "linear.h"
#include "llama_part.h"
#include "lora.h"
#include "octavo/llama.h"
#include "rope.h"
#include "team_room.h"

namespace octavo {

constexpr std::int64_t kParts = 2;          // of a step, for stages
constexpr std::int64_t kClaims = 8;         // of each thread in a phase over rows of activations, at least
constexpr std::int64_t kMostAtOnce = 16;    // rows of a claim
constexpr std::int64_t kMeeting = 1 << 11;  // numbers whose norm or rounding takes as long as a meeting of ranks
constexpr std::int64_t kPiece = 512;  // floats of an activation that one thread takes at once; a multiple of kBlock

struct Llama::Workspace {
    Buffer<float> x, apart, normed, qkv, attended, gate_up, inner, low;
    Buffer<InputBlock> digits;
    Buffer<Bf16Block> bf16;
    Part parts[kParts];
    std::vector<KvPages> layers, own;
    ExpertSpace experts;
};

// One part of a step in one thread.
class Llama::Run {
  public:
    // kv: of all heads.
    Run(Llama& model, Part& part, const std::vector<KvPages>& kv, PoolThread& thread, int threads)
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
        attended_ = (room != nullptr ? room->attended : space.attended.take(0)) + part.first * s_.heads * s_.head_dim;
        inner_ = (room != nullptr ? room->inner : space.inner.take(0)) + part.first * TeamRoom::inner_of(s_);
        queries_ = room != nullptr ? room->queries + part.first * s_.heads * s_.head_dim : nullptr;
        keys_ = room != nullptr ? room->keys + part.first * s_.kv_heads * s_.head_dim : nullptr;
        own_ = {model.queries(), model.keys(), model.values()};
        qkv_ = space.qkv.take(0);
        gate_up_ = space.gate_up.take(0);
        low_ = space.low.take(0);
        low_rows_ = lora_low_rows(step_);
    }

    void operator()() {
        begin();
        const auto first = static_cast<std::size_t>(share_.layers.first);
        const std::size_t end =
            share_.team == nullptr ? m_.layers_.size() : first + static_cast<std::size_t>(share_.layers.count);
        for (std::size_t index = first; index < end; ++index) {
            const LlamaLayer& layer = m_.layers_[index];
            if (qkv_row() > 0) {
                norm(layer.input_norm, layer.qkv, m_.all_have_heads());
                product(layer.qkv, normed_, layer.qkv_bias, qkv_, qkv_row(), false);
                adapt(index, &LoraLayer::qkv, normed_, s_.hidden, qkv_, qkv_row());
            }
            if (share_.team != nullptr && m_.normed_together(layer)) {
                show_heads();
                meet({{queries_, num_tokens_, s_.heads * s_.head_dim, &m_.host_attended_},
                      {keys_, num_tokens_, s_.kv_heads * s_.head_dim, &m_.host_keys_}});
            }
            place(layer, m_.space_->own[index]);
            if (m_.shares_attention()) {
                meet();
            }
            attend(layer, m_.space_->own[index]);
            meet({{attended_, num_tokens_, s_.heads * s_.head_dim, &m_.host_attended_}});
            round(layer.out, attended_);
            add_product(layer.out, attended_, layer.out_bias);
            adapt(index, &LoraLayer::out, attended_, s_.heads * s_.head_dim, sum_, s_.hidden);
            end_sum(layer.attended_norm);
            if (!layer.experts.router.empty()) {
                ask_experts(layer);
                continue;
            }
            norm(layer.mlp_norm, layer.gate_up);
            product(layer.gate_up, normed_, layer.gate_up_bias, gate_up_, gate_up_row(), false);
            adapt(index, &LoraLayer::gate_up, normed_, s_.hidden, gate_up_, gate_up_row());
            activate(layer.down);
            add_product(layer.down, inner_, layer.down_bias);
            adapt(index, &LoraLayer::down, inner_, s_.inner, sum_, s_.hidden);
            end_sum(layer.output_norm);
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

    // After all parts of a step, in the first rank of a host: until then the last stage there reads the step and writes
    // its keys and values.
    void end_step(const LlamaStep& step, std::int64_t parts) {
        if (m_.speaks()) {
            const TensorRef states = m_.states(0, step.token_ids.shape[0]);
            thread_.each(1, [&](std::int64_t) { share_.hosts->end_step(step, parts, kv_, states); });
        } else if (stages() > 1 && share_.team->rank() == 0) {
            thread_.each(1, [&](std::int64_t) { share_.team->wait_for_end(); });
        }
    }

    // Then the normed states of the step's rows.
    void take_rows(const TensorRef& hidden) {
        const float* x = x_ - part_.first * s_.hidden;
        each(step_.rows.shape[0], [&](std::int64_t i) {
            const float* from = x + step_.rows.as<std::int64_t>()[i] * s_.hidden;
            k_.rms_norm(from, m_.norm_.as<float>(), s_.eps, s_.hidden, hidden.as<float>() + i * hidden.stride[0]);
        });
    }

  private:
    // Work on single rows takes as long as claiming it from the other threads does, so a thread claims several at once.
    template <typename Body>
    void each(std::int64_t count, const Body& body) {
        const std::int64_t some = std::clamp<std::int64_t>(count / (threads_ * kClaims), 1, kMostAtOnce);
        thread_.each((count + some - 1) / some, [&](std::int64_t part) {
            const std::int64_t first = part * some, end = std::min(first + some, count);
            for (std::int64_t i = first; i < end; ++i) {
                body(i);
            }
        });
    }

    int stages() const { return share_.team != nullptr ? share_.team->stages() : 1; }

    // The embeddings, or what the stage before has left or sent.
    void begin() {
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
                k_.weight_row(m_.embedding_, step_.token_ids.as<std::int64_t>()[t], x);
                for (std::int64_t j = 0; s_.embedding_scale != 1.0F && j < s_.hidden; ++j) {
                    x[j] *= s_.embedding_scale;
                }
            });
        }
        meet();
    }

    // All ranks of the stage have done what they do before it, and other hosts' columns are there, too. Whether the
    // team is broken is asked at the end of the step.
    void meet(std::initializer_list<Columns> columns = {}) {
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

    void ask_experts(const LlamaLayer& layer) {
        const Experts& experts = layer.experts;
        norm(layer.mlp_norm, experts.gate_up);
        ExpertRun run(experts, expert_part(experts, share_), m_.space_->experts, s_.hidden, num_tokens_, normed_,
                      inputs_, share_.team != nullptr ? inner_ : nullptr, thread_, threads_);
        run.make_states();
        meet({{inner_, num_tokens_ * experts.top, expert_inner(experts), &share_.host_expert_inner},
              {run.shared_states(), num_tokens_, shared_inner(experts), &share_.host_shared_inner}});
        run.add_results(x_);
        meet({{x_, num_tokens_, s_.hidden, &share_.host_hidden}});
    }

    // From a token's queries, keys and values, or its gates and ups, to the next one's.
    std::int64_t qkv_row() const {
        return results_apart((own_.queries.count + own_.keys.count + own_.values.count) * s_.head_dim);
    }
    std::int64_t gate_up_row() const { return results_apart(2 * share_.inner.count); }

    // Work on all tokens, of so many numbers each, that comes before a product: the ranks divide it where it takes
    // longer than one more meeting.
    template <typename Body>
    void prepare(std::int64_t numbers, const Body& body, bool all_come = true) {
        Workspace& space = *m_.space_;
        const std::int64_t all = share_.team != nullptr ? share_.team->stage_size() : 1;
        const bool divided = all_come && (num_tokens_ - (num_tokens_ + all - 1) / all) * numbers > kMeeting;
        normed_ = divided ? m_.room_->normed + part_.first * s_.hidden : space.normed.take(0);
        inputs_ = divided ? m_.room_->inputs_from(part_.first) : Inputs{space.digits.take(0), space.bf16.take(0)};
        const std::int64_t rank = divided ? share_.team->rank_in_stage() : 0, ranks = divided ? all : 1;
        const std::int64_t first = num_tokens_ * rank / ranks, end = num_tokens_ * (rank + 1) / ranks;
        each(end - first, [&](std::int64_t i) { body(first + i); });
        if (divided) {
            meet();
        }
    }

    // Of the states, or these as they are where a layer does not norm them.
    void norm(const TensorRef& weight, const Stack& next, bool all_come = true) {
        const TensorRef* late = late_;
        late_ = nullptr;
        const auto token = [&](std::int64_t t) {
            float* x = x_ + t * s_.hidden;
            if (late != nullptr) {
                add_apart(t, *late);
            }
            if (weight.given()) {
                k_.rms_norm(x, weight.as<float>(), s_.eps, s_.hidden, normed_ + t * s_.hidden);
            }
            round_inputs(next.front(), weight.given() ? normed_ + t * s_.hidden : x, t, 0, s_.hidden, inputs_);
        };
        prepare(s_.hidden, token, all_come);
        normed_ = weight.given() ? normed_ : x_;
    }

    // The own columns of what is added to the states, which `end_sum` ends.
    void add_product(const Stack& stack, const float* x, const TensorRef& bias) {
        product(stack, x, bias, sum_ + share_.hidden.first, s_.hidden, !s_.sums_apart());
    }

    // Ranks divide the tokens of sums that lie apart. A process alone adds them when it norms the states.
    void end_sum(const TensorRef& norm) {
        meet({{sum_, num_tokens_, s_.hidden, &share_.host_hidden}});
        if (s_.sums_apart() && share_.team == nullptr) {
            late_ = &norm;
        } else if (s_.sums_apart()) {
            const std::int64_t rank = share_.team->rank_in_stage(), ranks = share_.team->stage_size();
            const std::int64_t first = num_tokens_ * rank / ranks, end = num_tokens_ * (rank + 1) / ranks;
            each(end - first, [&](std::int64_t i) { add_apart(first + i, norm); });
            meet();
        }
    }

    void add_apart(std::int64_t t, const TensorRef& norm) {
        float *x = x_ + t * s_.hidden, *sum = apart_ + t * s_.hidden;
        if (norm.given()) {
            k_.rms_norm(sum, norm.as<float>(), s_.eps, s_.hidden, sum);
        }
        for (std::int64_t i = 0; i < s_.hidden; ++i) {
            x[i] += sum[i] * s_.sum_scale;
        }
    }

    void round(const Stack& stack, const float* x) {
        const Weight& next = stack.front();
        if (next.rounding != Rounding::kNone) {
            prepare(next.cols,
                    [&](std::int64_t t) { round_inputs(next, x + t * next.cols, t, 0, next.cols, inputs_); });
        }
    }

    void product(const Stack& stack, const float* x, const TensorRef& bias, float* y, std::int64_t y_stride,
                 bool accumulate) {
        std::int64_t first = 0;
        for (const Weight& part : stack) {
            const float* added = bias.data != nullptr ? bias.as<float>() + first : nullptr;
            run_linear(thread_, threads_,
                       {part, x, part.cols, inputs_.digits, inputs_.bf16, num_tokens_, y + first, y_stride, added,
                        accumulate});
            first += part.rows;
        }
    }

    void adapt(std::size_t layer, LoraStackOf stack, const float* x, std::int64_t cols, float* y, std::int64_t rows) {
        add_lora(thread_, threads_, step_, {layer, stack, x, cols, y, rows, low_, low_rows_});
    }

    // The own queries and keys, for ranks that norm those of all heads.
    void show_heads() {
        const std::int64_t d = s_.head_dim;
        each(qkv_row() > 0 ? num_tokens_ : 0, [&](std::int64_t t) {
            const float* heads = qkv_ + t * qkv_row();
            std::copy_n(heads, own_.queries.count * d, queries_ + (t * s_.heads + own_.queries.first) * d);
            std::copy_n(heads + own_.queries.count * d, own_.keys.count * d,
                        keys_ + (t * s_.kv_heads + own_.keys.first) * d);
        });
    }

    // The own ones of a row's numbers, normed with all of them.
    void norm_own(const float* all, std::int64_t count, const TensorRef& weight, std::int64_t first, std::int64_t own,
                  float* space, float* to) {
        k_.rms_norm(all, weight.as<float>(), s_.eps, count, space);
        std::copy_n(space + first, own, to);
    }

    // Norms and turns queries and keys where they are, and puts keys and values into their slots. Queries that other
    // ranks read go to where their attention comes to lie.
    void place(const LlamaLayer& layer, const KvPages& kv) {
        const std::int64_t d = s_.head_dim, queries = own_.queries.count, keys = own_.keys.count, row = qkv_row();
        const TensorRef &cos = layer.cos.given() ? layer.cos : m_.cos_, &sin = layer.sin.given() ? layer.sin : m_.sin_;
        const std::int64_t turning = queries + keys, pairs = m_.cos_.shape[1] / 2, size = kv.block_size;
        each(row > 0 ? num_tokens_ : 0, [&](std::int64_t t) {
            float* heads = qkv_ + t * row;
            const std::int64_t position = step_.positions.as<std::int64_t>()[t];
            const Rope rope{cos.as<float>() + position * cos.stride[0], sin.as<float>() + position * sin.stride[0],
                            pairs, false};
            const bool together = m_.normed_together(layer);
            float* space = thread_.scratch(together ? s_.heads * d : d);
            if (together && share_.team != nullptr) {
                const std::int64_t q = s_.heads * d, k = s_.kv_heads * d;
                norm_own(queries_ + t * q, q, layer.q_norm, own_.queries.first * d, queries * d, space, heads);
                norm_own(keys_ + t * k, k, layer.k_norm, own_.keys.first * d, keys * d, space, heads + queries * d);
            } else if (together) {
                k_.rms_norm(heads, layer.q_norm.as<float>(), s_.eps, queries * d, heads);
                k_.rms_norm(heads + queries * d, layer.k_norm.as<float>(), s_.eps, keys * d, heads + queries * d);
            }
            for (std::int64_t h = 0; h < turning; ++h) {
                float* head = heads + h * d;
                const TensorRef& weight = h < queries ? layer.q_norm : layer.k_norm;
                if (weight.given() && !together) {
                    k_.rms_norm(head, weight.as<float>(), s_.eps, d, head);
                }
                if (layer.rotated) {
                    turn(k_, rope, head, space);
                }
            }
            const std::int64_t slot = step_.slots.as<std::int64_t>()[t];
            const auto write = [&](const KvSide& side, const Span& own, const float* from) {
                const std::int64_t first = own.first - share_.kv_heads.first;
                for (std::int64_t h = 0; slot >= 0 && h < own.count; ++h) {
                    k_.write_slot(kv, side, slot / size, first + h, slot % size, from + h * d);
                }
            };
            write(kv.keys, own_.keys, heads + queries * d);
            write(kv.values, own_.values, heads + turning * d);
            if (m_.shares_attention()) {
                std::copy_n(heads, queries * d, attended_ + (t * s_.heads + own_.queries.first) * d);
            }
        });
    }

    void attend(const LlamaLayer& layer, const KvPages& kv) {
        const std::int64_t first = share_.kv_heads.first, group = m_.group();
        if (share_.kv_heads.count == 0) {
            return;
        }
        AttentionJob job = attention_job(kv, share_.kv_heads.count * group);
        job.out = attended_ + first * group * s_.head_dim;
        job.queries = m_.shares_attention() ? job.out : qkv_;
        job.query_token = m_.shares_attention() ? s_.heads * s_.head_dim : qkv_row();
        job.query_head = s_.head_dim;
        job.out_token = s_.heads * s_.head_dim;
        job.out_head = s_.head_dim;
        job.scale = s_.scale;
        job.soft_cap = s_.attention_cap;
        job.window = layer.window;
        job.sinks = layer.sinks.given() ? layer.sinks.as<float>() + first * group : nullptr;
        put_sparse(job, layer.sparse, s_.heads);
        job.sparse_offset += first * (group * job.sparse_head + job.sparse_kv_head);
        part_.plans.at(layer.window).run(thread_, job);
    }

    void activate(const Stack& next) {
        const auto [start, size] = share_.inner;
        const std::int64_t pieces = (size + kPiece - 1) / kPiece;
        each(num_tokens_ * pieces, [&, first = start, own = size](std::int64_t i) {
            const std::int64_t t = i / pieces, from = i % pieces * kPiece;
            const std::int64_t count = own - from < kPiece ? own - from : kPiece;
            const float* gate = gate_up_ + t * gate_up_row() + from;
            (s_.gelu ? gelu_mul : k_.silu_mul)(gate, gate + own, count, inner_ + t * s_.inner + first + from);
            if (share_.team == nullptr) {
                round_inputs(next.front(), inner_ + t * s_.inner, t, from, count, inputs_);
            }
        });
        if (share_.team != nullptr) {
            meet({{inner_, num_tokens_, s_.inner, &share_.host_inner}});
            round(next, inner_);
        }
    }

    Llama& m_;
    const LlamaSizes& s_;
    const LlamaShare& share_;
    Part& part_;
    const LlamaStep& step_;
    const std::vector<KvPages>& kv_;
    PoolThread& thread_;
    const int threads_;
    const Kernels& k_;
    struct {
        Span queries, keys, values;
    } own_;  // heads
    std::int64_t num_tokens_;
    float *x_, *apart_, *sum_, *normed_, *qkv_, *attended_, *gate_up_, *inner_, *low_, *queries_, *keys_;
    const TensorRef* late_ = nullptr;  // the norm of what lies apart and is still to be added
    std::int64_t low_rows_;
    Inputs inputs_;
};

}  // namespace octavo
