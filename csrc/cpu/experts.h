// A layer's mixture of experts within a run of the pool: each token's MLP is the sum of a few of many.
//
// Tokens are grouped by expert, so that each expert's matrices are read once for all tokens that ask it. What a token
// gets depends on its own row alone: its experts are chosen from its own scores, a column of a product does not depend
// on those beside it, and what the experts give is added in the order in which the token has chosen them.
#pragma once

#include <vector>

#include "buffer.h"
#include "linear.h"
#include "octavo/llama.h"

namespace octavo {

constexpr std::int64_t kMostExperts = 4096, kMostGroups = 64;

// The columns of one expert in the products of a layer.
struct AskedExpert {
    std::int64_t expert, first, count;  // `first` is a multiple of kInputColumns
};

// What a rank computes of a layer's experts: inner states, and columns of what comes of them.
struct ExpertPart {
    Span inner, shared_inner, hidden;
};

// All of it, where there is one rank.
ExpertPart expert_part(const Experts& experts, const LlamaShare& share);

struct ExpertSpace {
    Buffer<float> scores, shares, gathered, gate_up, activated, out, shared, shared_scores, shared_activated;
    Buffer<std::int64_t> chosen, columns;  // [tokens, top]
    Buffer<InputBlock> digits, shared_digits;
    Buffer<Bf16Block> bf16, shared_bf16;
    std::vector<AskedExpert> asked;
    std::vector<std::int64_t> next;  // by expert: the column of the next pair

    // Room for so many tokens of a layer of these experts.
    void take(const Experts& experts, const ExpertPart& part, std::int64_t hidden, std::int64_t num_tokens);
};

// ArgumentError unless the tensors fit together, and are of that part. A layer without a router has no experts.
void check_experts(const Experts& experts, const ExpertPart& part, std::int64_t hidden);

// How long the inner states are as a whole: of an expert, and of the one that all tokens ask.
inline std::int64_t expert_inner(const Experts& experts) { return experts.down.empty() ? 0 : experts.down[0].cols; }
inline std::int64_t shared_inner(const Experts& experts) {
    return experts.shared_down.empty() ? 0 : experts.shared_down[0].cols;
}

class ExpertRun {
  public:
    // normed [tokens, hidden], and what it is rounded to for the experts' products. states: where ranks leave their
    // parts of inner states for each other, [tokens, top, inner] and behind those [tokens, shared inner]; null: there
    // is one rank.
    ExpertRun(const Experts& experts, const ExpertPart& part, ExpertSpace& space, std::int64_t hidden,
              std::int64_t num_tokens, const float* normed, const Inputs& rounded, float* states, PoolThread& thread,
              int threads);

    // The part's inner states. Those of all ranks are there when the second one is called.
    void make_states();
    // x [tokens, hidden] += what the experts make of the tokens, in the part's columns.
    void add_results(float* x);
    float* shared_states() const { return states_ + num_tokens_ * e_.top * inner_; }

  private:
    void choose(std::int64_t token);
    void leave_groups(float* ranks) const;
    void group();
    void gather(std::int64_t pair);
    void multiply(const Stack& weights, const TensorRef& bias, const float* from, std::int64_t cols, float* to);
    void activate(std::int64_t pair, std::int64_t from, std::int64_t some);
    void take_states(std::int64_t pair);
    void make_shared_states();
    void multiply_shared();
    void add(std::int64_t token, float* x) const;

    const Experts& e_;
    const ExpertPart part_;
    ExpertSpace& space_;
    const std::int64_t hidden_, num_tokens_, inner_, shared_inner_;
    const float* normed_;
    const Inputs rounded_;
    float* const states_;
    PoolThread& thread_;
    const int threads_;
    const Kernels& k_;
    float *scores_, *ranks_, *shares_, *gathered_, *gate_up_, *activated_, *out_;
    std::int64_t *chosen_, *columns_;
    Inputs grouped_, shared_;
};

}  // namespace octavo
