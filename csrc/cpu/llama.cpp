#include "octavo/llama.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <stdexcept>
#include <utility>

#include "attention.h"
#include "buffer.h"
#include "experts.h"
#include "linear.h"
#include "lora.h"
#include "rope.h"
#include "team_room.h"

namespace octavo {
namespace {

constexpr std::int64_t kMostSize = std::int64_t{1} << 30;  // of anything: two of them multiply within 64 bits
constexpr std::int64_t kClaims = 8;       // of each thread in a phase over rows of activations, at least
constexpr std::int64_t kMostAtOnce = 16;  // rows of a claim
constexpr std::int64_t kPiece = 512;      // floats of an activation that one thread takes at once; a multiple of kBlock

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
        require(part.rounding() == stack.front().rounding(), name, "has parts that round their inputs differently");
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
    return {nullptr, 0, 0, {0, sizes.kv_heads}, {0, sizes.hidden}, {0, sizes.inner}, {0, sizes.vocab}};
}

}  // namespace

struct Llama::Workspace {
    Buffer<float> x, normed, qkv, attended, gate_up, inner, low;
    Buffer<InputBlock> digits;
    Buffer<Bf16Block> bf16;
    std::map<std::int64_t, AttentionPlan> plans;  // by window
    std::vector<KvPages> layers;
    ExpertSpace experts;
};

// One step in one thread.
class Llama::Run {
  public:
    Run(Llama& model, const LlamaStep& step, const std::vector<KvPages>& kv, PoolThread& thread, int threads)
        : m_(model),
          s_(model.sizes_),
          share_(model.share_),
          step_(step),
          kv_(kv),
          thread_(thread),
          threads_(threads),
          k_(kernels()) {
        num_tokens_ = step.token_ids.shape[0];
        Workspace& space = *model.space_;
        const TeamRoom* room = model.room_.get();
        x_ = room != nullptr ? room->x : space.x.take(0);
        attended_ = room != nullptr ? room->attended : space.attended.take(0);
        inner_ = room != nullptr ? room->inner : space.inner.take(0);
        normed_ = space.normed.take(0);
        qkv_ = space.qkv.take(0);
        gate_up_ = space.gate_up.take(0);
        low_ = space.low.take(0);
        low_rows_ = lora_low_rows(step);
        inputs_ = {space.digits.take(0), space.bf16.take(0)};
    }

    // `hidden` is not given in ranks other than 0.
    void operator()(const TensorRef& hidden) {
        const std::int64_t rank = share_.team != nullptr ? share_.team->rank() : 0;
        const std::int64_t ranks = share_.team != nullptr ? share_.team->size() : 1;
        each((num_tokens_ - rank + ranks - 1) / ranks, [&](std::int64_t i) {
            const std::int64_t t = i * ranks + rank;
            k_.weight_row(m_.embedding_, step_.token_ids.as<std::int64_t>()[t], x_ + t * s_.hidden);
        });
        meet();
        for (std::size_t index = 0; index < m_.layers_.size(); ++index) {
            const LlamaLayer& layer = m_.layers_[index];
            if (share_.kv_heads.count > 0) {
                norm(layer.input_norm, layer.qkv);
                product(layer.qkv, normed_, layer.qkv_bias, qkv_, qkv_row(), false);
                adapt(index, &LoraLayer::qkv, normed_, s_.hidden, qkv_, qkv_row());
                place(layer, kv_[index]);
                attend(layer, kv_[index]);
            }
            meet();
            round(layer.out, attended_);
            product(layer.out, attended_, layer.out_bias, x_ + share_.hidden.first, s_.hidden, true);
            adapt(index, &LoraLayer::out, attended_, s_.heads * s_.head_dim, x_, s_.hidden);
            meet();
            if (!layer.experts.router.empty()) {
                const Experts& experts = layer.experts;
                norm(layer.mlp_norm, experts.gate_up);
                ExpertRun(experts, m_.space_->experts, s_.hidden, num_tokens_, normed_, inputs_, thread_, threads_)(x_);
                continue;
            }
            norm(layer.mlp_norm, layer.gate_up);
            product(layer.gate_up, normed_, layer.gate_up_bias, gate_up_, 2 * share_.inner.count, false);
            adapt(index, &LoraLayer::gate_up, normed_, s_.hidden, gate_up_, 2 * s_.inner);
            activate(layer.down);
            product(layer.down, inner_, layer.down_bias, x_ + share_.hidden.first, s_.hidden, true);
            adapt(index, &LoraLayer::down, inner_, s_.inner, x_, s_.hidden);
            meet();
        }
        each(hidden.given() ? step_.rows.shape[0] : 0, [&](std::int64_t i) {
            const float* from = x_ + step_.rows.as<std::int64_t>()[i] * s_.hidden;
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

    // All ranks have done what they do before it. Whether the team is broken is asked at the end of the step.
    void meet() {
        if (share_.team != nullptr) {
            thread_.each(1, [&](std::int64_t) { share_.team->meet_in_step(); });
        }
    }

    // Of queries, keys and values of a token.
    std::int64_t qkv_row() const { return share_.kv_heads.count * (group() + 2) * s_.head_dim; }
    std::int64_t group() const { return s_.heads / s_.kv_heads; }

    void norm(const TensorRef& weight, const Stack& next) {
        each(num_tokens_, [&](std::int64_t t) {
            k_.rms_norm(x_ + t * s_.hidden, weight.as<float>(), s_.eps, s_.hidden, normed_ + t * s_.hidden);
            round_inputs(next.front(), normed_ + t * s_.hidden, t, 0, s_.hidden, inputs_);
        });
    }

    void round(const Stack& stack, const float* x) {
        const Weight& next = stack.front();
        if (next.rounding() != Rounding::kNone) {
            each(num_tokens_, [&](std::int64_t t) { round_inputs(next, x + t * next.cols, t, 0, next.cols, inputs_); });
        }
    }

    void product(const Stack& stack, const float* x, const TensorRef& bias, float* y, std::int64_t y_stride,
                 bool accumulate) {
        std::int64_t first = 0;
        for (const Weight& part : stack) {
            const float* added = bias.data != nullptr ? bias.as<float>() + first : nullptr;
            run_linear(
                thread_, threads_,
                {part, x, part.cols, inputs_.digits, inputs_.bf16, num_tokens_, y + first, y_stride, added, accumulate});
            first += part.rows;
        }
    }

    void adapt(std::size_t layer, LoraStackOf stack, const float* x, std::int64_t cols, float* y, std::int64_t rows) {
        add_lora(thread_, threads_, step_, {layer, stack, x, cols, y, rows, low_, low_rows_});
    }

    // Norms and turns queries and keys where they are, and puts keys and values into their slots.
    void place(const LlamaLayer& layer, const KvPages& kv) {
        const std::int64_t d = s_.head_dim, kv_heads = share_.kv_heads.count, queries = kv_heads * group();
        const std::int64_t turning = queries + kv_heads, row = qkv_row();
        const std::int64_t pairs = m_.cos_.shape[1] / 2, size = kv.block_size;
        each(num_tokens_, [&](std::int64_t t) {
            float* heads = qkv_ + t * row;
            const std::int64_t position = step_.positions.as<std::int64_t>()[t];
            const Rope rope{m_.cos_.as<float>() + position * m_.cos_.stride[0],
                            m_.sin_.as<float>() + position * m_.sin_.stride[0], pairs, false};
            float* space = thread_.scratch(d);
            for (std::int64_t h = 0; h < turning; ++h) {
                float* head = heads + h * d;
                const TensorRef& weight = h < queries ? layer.q_norm : layer.k_norm;
                if (weight.data != nullptr) {
                    k_.rms_norm(head, weight.as<float>(), s_.eps, d, head);
                }
                if (layer.rotated) {
                    turn(k_, rope, head, space);
                }
            }
            const std::int64_t slot = step_.slots.as<std::int64_t>()[t];
            for (std::int64_t h = 0; slot >= 0 && h < kv_heads; ++h) {
                k_.write_slot(kv, kv.keys, slot / size, h, slot % size, heads + (queries + h) * d);
                k_.write_slot(kv, kv.values, slot / size, h, slot % size, heads + (turning + h) * d);
            }
        });
    }

    void attend(const LlamaLayer& layer, const KvPages& kv) {
        const std::int64_t first = share_.kv_heads.first;
        AttentionJob job = attention_job(kv, share_.kv_heads.count * group());
        job.queries = qkv_;
        job.query_token = qkv_row();
        job.query_head = s_.head_dim;
        job.out = attended_ + first * group() * s_.head_dim;
        job.out_token = s_.heads * s_.head_dim;
        job.out_head = s_.head_dim;
        job.scale = s_.scale;
        job.window = layer.window;
        put_sparse(job, layer.sparse, s_.heads);
        job.sparse_offset += first * (group() * job.sparse_head + job.sparse_kv_head);
        m_.space_->plans.at(layer.window).run(thread_, job);
    }

    void activate(const Stack& next) {
        const auto [start, size] = share_.inner;
        const std::int64_t pieces = (size + kPiece - 1) / kPiece;
        each(num_tokens_ * pieces, [&, first = start, own = size](std::int64_t i) {
            const std::int64_t t = i / pieces, from = i % pieces * kPiece;
            const std::int64_t count = own - from < kPiece ? own - from : kPiece;
            const float* gate = gate_up_ + t * 2 * own + from;
            k_.silu_mul(gate, gate + own, count, inner_ + t * s_.inner + first + from);
            if (share_.team == nullptr) {
                round_inputs(next.front(), inner_ + t * s_.inner, t, from, count, inputs_);
            }
        });
        if (share_.team != nullptr) {
            meet();
            round(next, inner_);
        }
    }

    Llama& m_;
    const LlamaSizes& s_;
    const LlamaShare& share_;
    const LlamaStep& step_;
    const std::vector<KvPages>& kv_;
    PoolThread& thread_;
    const int threads_;
    const Kernels& k_;
    std::int64_t num_tokens_;
    float *x_, *normed_, *qkv_, *attended_, *gate_up_, *inner_, *low_;
    std::int64_t low_rows_;
    Inputs inputs_;
};

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
    const LlamaSizes& s = sizes_;
    for (const std::int64_t size : {s.vocab, s.hidden, s.inner, s.heads, s.kv_heads, s.head_dim}) {
        require(size > 0 && size <= kMostSize, "sizes", "are not positive, or no model's");
    }
    require(s.heads % s.kv_heads == 0, "sizes", "have heads that do not share key-value heads");
    expect_weight(embedding_, "embedding", s.vocab, s.hidden);
    for (const auto& [own, all] : {std::pair{share_.kv_heads, s.kv_heads}, std::pair{share_.hidden, s.hidden},
                                   std::pair{share_.inner, s.inner}, std::pair{share_.vocab, s.vocab}}) {
        require(own.first >= 0 && own.count >= 0 && own.first + own.count <= all, "share", "is not one of this model");
    }
    const std::int64_t queries = s.heads * s.head_dim, own_hidden = share_.hidden.count;
    const std::int64_t qkv_rows = share_.kv_heads.count * (s.heads / s.kv_heads + 2) * s.head_dim;
    expect_weight(head_, "head", share_.vocab.count, s.hidden);
    expect_vector(norm_, "norm", s.hidden);
    expect(cos_, "cos", {kAny, kAny}, DType::kF32);
    expect(sin_, "sin", {cos_.shape[0], cos_.shape[1]}, DType::kF32);
    require(cos_.shape[1] % 2 == 0 && cos_.shape[1] <= s.head_dim, "cos", "has another width than a head");
    for (const LlamaLayer& layer : layers_) {
        expect_vector(layer.input_norm, "input_norm", s.hidden);
        expect_vector(layer.mlp_norm, "mlp_norm", s.hidden);
        expect_stack(layer.qkv, "qkv", qkv_rows, s.hidden);
        expect_stack(layer.out, "out", own_hidden, queries);
        require(share_.team == nullptr || layer.experts.router.empty(), "share", "is of a model with experts");
        check_experts(layer.experts, s.hidden);
        if (layer.experts.router.empty()) {
            expect_stack(layer.gate_up, "gate_up", 2 * share_.inner.count, s.hidden);
            expect_stack(layer.down, "down", own_hidden, s.inner);
        }
        expect_vector(layer.qkv_bias, "qkv_bias", qkv_rows, true);
        expect_vector(layer.out_bias, "out_bias", own_hidden, true);
        expect_vector(layer.gate_up_bias, "gate_up_bias", 2 * share_.inner.count, true);
        expect_vector(layer.down_bias, "down_bias", own_hidden, true);
        expect_vector(layer.q_norm, "q_norm", s.head_dim, true);
        expect_vector(layer.k_norm, "k_norm", s.head_dim, true);
        require(layer.window >= 0, "window", "is negative");
        check_sparse(layer.sparse, s.heads);
        space_->plans[layer.window];
    }
    if (share_.team != nullptr) {
        room_ = std::make_unique<TeamRoom>(*share_.team, s, share_.tokens, share_.plan_bytes);
    }
}

Llama::~Llama() = default;

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
    for (const LoraGroup& group : step.loras) {
        check_lora(*group.lora);
    }
    if (!kv.empty()) {
        check_batch(step.batch, num_tokens, kv[0].num_blocks, kv[0].block_size);
    }
    const auto& [cu_q, seq_lens, tables] = step.batch;
    expect_apart(hidden, "hidden",
                 {&step.token_ids, &step.positions, &step.slots, &step.rows, &cu_q, &seq_lens, &tables});
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
        require(step.loras.empty(), "loras", "do not run in a group");
        room_->order_forward(step);
        share_.team->meet_in_step();
    }
    run(hidden, step, layers);
    if (room_ != nullptr && share_.team->broken()) {
        throw std::runtime_error(share_.team->trouble());
    }
}

void Llama::run(const TensorRef& hidden, const LlamaStep& step, const std::vector<KvPages>& kv) {
    std::vector<KvPages> own;
    for (const KvPages& layer : kv) {
        own.push_back(of_heads(layer, share_.kv_heads));
    }
    const LlamaSizes& s = sizes_;
    const std::int64_t n = step.token_ids.shape[0], queries = s.heads * s.head_dim, alone = room_ == nullptr ? n : 0;
    const std::int64_t widest = std::max({s.hidden, queries, s.inner}), group = s.heads / s.kv_heads;
    space_->x.take(alone * s.hidden);
    space_->normed.take(n * s.hidden);
    space_->qkv.take(n * share_.kv_heads.count * (group + 2) * s.head_dim);
    space_->attended.take(alone * queries);
    space_->gate_up.take(n * 2 * share_.inner.count);
    space_->inner.take(alone * s.inner);
    space_->low.take(step.loras.empty() ? 0 : step.lora_rows.shape[0] * lora_low_rows(step));
    space_->digits.take(num_blocks(n, widest));
    space_->bf16.take(num_blocks(n, widest));
    for (const LlamaLayer& layer : layers_) {
        if (!layer.experts.router.empty()) {
            space_->experts.take(layer.experts, s.hidden, n);
        }
    }
    for (auto& [window, plan] : space_->plans) {
        plan.build(step.batch, share_.kv_heads.count, group, s.head_dim, window);
    }
    Pool& pool = Pool::instance();
    const int threads = pool.size();
    pool.run([&](PoolThread& thread) { Run(*this, step, own, thread, threads)(hidden); });
}

void Llama::serve(const std::vector<KvCache>& kv) {
    require(room_ != nullptr && share_.team->rank() > 0, "share", "is not that of a rank that serves");
    require(kv.size() == layers_.size(), "kv", "has another number of layers");
    std::vector<KvPages> layers;
    for (const KvCache& layer : kv) {
        layers.push_back(kv_pages(layer, sizes_.head_dim));
        require(layers.back().num_heads == sizes_.kv_heads, "kv", "has another number of heads");
    }
    while (share_.team->meet_for_orders()) {
        switch (room_->order()) {
            case Order::kForward:
                run(TensorRef{}, room_->step(), layers);
                break;
            case Order::kLogits:
                share_of_logits(room_->rows());
                break;
        }
    }
}

std::int64_t Llama::team_bytes(const LlamaSizes& sizes, std::int64_t tokens, std::int64_t plan_bytes) {
    return Team::kControlBytes + TeamRoom::bytes(sizes, tokens, plan_bytes);
}

void Llama::logits(const TensorRef& out, const TensorRef& hidden) const {
    expect(hidden, "hidden", {kAny, sizes_.hidden}, DType::kF32);
    if (room_ == nullptr) {
        return linear(out, hidden, head_, TensorRef{});
    }
    const std::int64_t count = hidden.shape[0], row = sizes_.hidden * 4;
    expect(out, "out", {count, sizes_.vocab}, DType::kF32);
    expect_apart(out, "out", {&hidden});
    for (std::int64_t first = 0; first < count; first += TeamRoom::kRows) {
        const std::int64_t rows = std::min(TeamRoom::kRows, count - first);
        for (std::int64_t i = 0; i < rows; ++i) {
            std::memcpy(room_->hidden + i * sizes_.hidden, hidden.as<float>() + (first + i) * hidden.stride[0],
                        static_cast<std::size_t>(row));
        }
        room_->order_logits(rows);
        share_.team->meet_in_step();
        share_of_logits(rows);
        if (share_.team->broken()) {
            throw std::runtime_error(share_.team->trouble());
        }
        Pool::instance().run([&](PoolThread& thread) {
            thread.each(rows, [&](std::int64_t i) {
                std::memcpy(out.as<float>() + (first + i) * out.stride[0], room_->logits + i * sizes_.vocab,
                            static_cast<std::size_t>(sizes_.vocab) * 4);
            });
        });
    }
}

// The columns of this rank's tokens, and then those of all are there.
void Llama::share_of_logits(std::int64_t rows) const {
    const auto floats = [rows](float* data, std::int64_t columns, std::int64_t stride) {
        TensorRef tensor;
        tensor.data = data;
        tensor.ndim = 2;
        tensor.shape[0] = rows;
        tensor.shape[1] = columns;
        tensor.stride[0] = stride;
        tensor.stride[1] = 1;
        return tensor;
    };
    linear(floats(room_->logits + share_.vocab.first, share_.vocab.count, sizes_.vocab),
           floats(room_->hidden, sizes_.hidden, sizes_.hidden), head_, TensorRef{});
    share_.team->meet_in_step();
}

}  // namespace octavo
