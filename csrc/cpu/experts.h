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

constexpr std::int64_t kMostExperts = 4096;

// The columns of one expert in the products of a layer.
struct AskedExpert {
    std::int64_t expert, first, count;  // `first` is a multiple of kInputColumns
};

struct ExpertSpace {
    Buffer<float> scores, shares, gathered, gate_up, activated, out, shared, shared_scores;
    Buffer<std::int64_t> chosen, columns;  // [tokens, top]
    Buffer<InputBlock> digits;
    Buffer<Bf16Block> bf16;
    std::vector<AskedExpert> asked;
    std::vector<std::int64_t> next;  // by expert: the column of the next pair

    // Room for so many tokens of a layer of these experts.
    void take(const Experts& experts, std::int64_t hidden, std::int64_t num_tokens);
};

// ArgumentError unless the tensors fit together. A layer without a router has no experts.
void check_experts(const Experts& experts, std::int64_t hidden);

class ExpertRun {
  public:
    // normed [tokens, hidden], and what it is rounded to for the experts' products.
    ExpertRun(const Experts& experts, ExpertSpace& space, std::int64_t hidden, std::int64_t num_tokens,
              const float* normed, const Inputs& rounded, PoolThread& thread, int threads);

    // x [tokens, hidden] += what the experts make of the tokens.
    void operator()(float* x);

  private:
    void choose(std::int64_t token);
    void leave_groups(float* ranks) const;
    void group();
    void gather(std::int64_t pair);
    void multiply(const Stack& weights, const TensorRef& bias, const float* from, std::int64_t cols, float* to);
    void activate(std::int64_t piece, std::int64_t pieces);
    void run_shared();
    void add(std::int64_t token, float* x) const;

    const Experts& e_;
    ExpertSpace& space_;
    const std::int64_t hidden_, num_tokens_, inner_;
    const float* normed_;
    const Inputs rounded_;
    PoolThread& thread_;
    const int threads_;
    const Kernels& k_;
    float *scores_, *ranks_, *shares_, *gathered_, *gate_up_, *activated_, *out_;
    std::int64_t *chosen_, *columns_;
    Inputs grouped_;
};

}  // namespace octavo
