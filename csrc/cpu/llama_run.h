// What a step of a decoder is in one thread: its phases, one after the other.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "buffer.h"
#include "experts.h"
#include "linear.h"
#include "llama_part.h"
#include "lora.h"
#include "octavo/llama.h"
#include "team_room.h"

namespace octavo {

constexpr std::int64_t kParts = 2;          // of a step, for stages
constexpr std::int64_t kClaims = 8;         // of each thread in a phase over rows of activations, at least
constexpr std::int64_t kMostAtOnce = 16;    // rows of a claim
constexpr std::int64_t kMeeting = 1 << 11;  // numbers whose norm or rounding takes as long as a meeting of ranks
constexpr std::int64_t kPiece = 512;  // floats of an activation that one thread takes at once; a multiple of kBlock

struct Llama::Workspace {
    Buffer<float> x, apart, normed, qkv, attended, gate_up, inner, low;
    Buffer<LowRank> low_rank;                                  // of each token
    Buffer<float> low_queries, plain_queries, latent_queries;  // of latent attention
    Buffer<InputBlock> digits, head_digits;
    Buffer<Bf16Block> bf16, head_bf16;
    std::int64_t latent_groups = 1;
    Part parts[kParts];
    std::vector<KvPages> layers, own;
    ExpertSpace experts;

    void take_latents(const LlamaSizes& sizes, std::int64_t num_tokens);
};

// One part of a step in one thread. All threads call its functions in the same order.
class Llama::Run {
  public:
    // kv: of all heads.
    Run(Llama& model, Part& part, const std::vector<KvPages>& kv, PoolThread& thread, int threads);

    // All layers (llama_run.cpp).
    void operator()();

    // After all parts of a step, in the first rank of a host: until then the last stage there reads the step and writes
    // its keys and values.
    void end_step(const LlamaStep& step, std::int64_t parts);

    // Then the normed states of the step's rows.
    void take_rows(const TensorRef& hidden);

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
    void begin();

    // What stands for a token that shows a picture; null: it shows none.
    const float* shown(std::int64_t t) const;
    // Adds what pictures say after this layer.
    void show_after(std::size_t index);

    // All ranks of the stage have done what they do before it, and other hosts' columns are there, too. Whether the
    // team is broken is asked at the end of the step.
    void meet(std::initializer_list<Columns> columns = {});

    // What layers of all kinds have (llama_layer.cpp).

    // Of the states, or these as they are where a layer does not norm them.
    void norm(const TensorRef& weight, const Stack& next, bool all_come = true);
    // A product to which adapters add, and the row of their stack with which its own rows begin.
    struct Adapted {
        std::size_t layer;
        LoraStackOf stack;
        std::int64_t first;
    };
    void product(const Stack& stack, const float* x, const TensorRef& bias, float* y, std::int64_t y_stride,
                 bool accumulate, const Adapted* adapted = nullptr);
    // The own columns of what is added to the states, which `end_sum` ends.
    void add_product(std::size_t layer, LoraStackOf adapted, const Stack& stack, const float* x, const TensorRef& bias);
    // Ranks divide the tokens of sums that lie apart. A process alone adds them when it norms the states.
    void end_sum(const TensorRef& norm);
    void add_apart(std::int64_t t, const TensorRef& norm);
    void round(const Stack& stack, const float* x);
    void run_mlp(std::size_t index);
    void activate(const Stack& next);
    void ask_experts(const LlamaLayer& layer);

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

    // From a token's queries, keys and values, or its gates and ups, to the next one's.
    std::int64_t qkv_row() const { return results_apart(m_.qkv_rows()); }
    std::int64_t gate_up_row() const { return results_apart(2 * share_.inner.count); }

    // Attention with keys and values of each head (llama_heads.cpp).

    void attend_heads(std::size_t index);
    // The own queries and keys, for ranks that norm those of all heads.
    void show_heads();
    // The own ones of a row's numbers, normed with all of them.
    void norm_own(const float* all, std::int64_t count, const TensorRef& weight, std::int64_t first, std::int64_t own,
                  float* space, float* to);
    // Norms and turns queries and keys where they are, and puts keys and values into their slots. Queries that other
    // ranks read go to where their attention comes to lie.
    void place(const LlamaLayer& layer, const KvPages& kv);
    void attend(const LlamaLayer& layer, const KvPages& kv);

    // Attention with one latent for all heads (llama_latent.cpp).

    // Rows of all tokens and heads, so many floats apart.
    struct HeadRows {
        float* data;
        std::int64_t token, head;
    };
    void attend_latents(std::size_t index);
    // Each is what is rotated, and then the rest.
    HeadRows make_queries(const LlamaLayer& layer);
    // Turns queries where they are, and copies what is rotated to where they ask; puts latents into their slots.
    void place_latents(const LlamaLayer& layer, const KvPages& kv, const HeadRows& queries, const HeadRows& asking);
    void round_heads(const Weight& weight, const HeadRows& x);
    // Each head's own rows of the matrix with its own inputs.
    void multiply_heads(const Weight& weight, const HeadRows& x, const HeadRows& y);
    Inputs inputs_of_head(const Weight& weight, std::int64_t head) const;

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
    LowRank* low_rank_;
    Inputs inputs_;
};

}  // namespace octavo
