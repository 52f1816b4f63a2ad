// What the ranks of a decoder of the Llama family tell each other: what rank 0 wants, and the activations that all
// read.
#pragma once

#include <algorithm>

#include "linear.h"
#include "octavo/llama.h"

namespace octavo {

class TeamRoom : public TeamOrder {
  public:
    TeamRoom(const Team& team, const LlamaSizes& sizes, std::int64_t tokens, std::int64_t plan_bytes);
    static std::int64_t bytes(const LlamaSizes& sizes, std::int64_t tokens, std::int64_t plan_bytes);
    // Floats of a token's inner state, in whatever layer.
    static std::int64_t inner_of(const LlamaSizes& sizes) {
        return sizes.inner > sizes.asked_inner ? sizes.inner : sizes.asked_inner;
    }
    // Numbers that a product takes of a token, at most.
    static std::int64_t widest(const LlamaSizes& sizes) {
        return std::max({sizes.hidden, sizes.attended(), sizes.inner, sizes.latent.query_rank});
    }

    // [tokens, hidden], [tokens, heads head_dim], [tokens, inner_of(sizes)], [kRows, hidden], [kRows, vocab]
    float *x = nullptr, *attended = nullptr, *inner = nullptr, *hidden = nullptr, *logits = nullptr;
    // [tokens, heads head_dim], [tokens, kv_heads head_dim]: of a layer that norms those of all heads together
    float *queries = nullptr, *keys = nullptr;
    // [tokens, hidden]: what attention and MLP give, where it is not added at once
    float* apart = nullptr;
    // [tokens, hidden], and inputs of products, where ranks divide the norms and the rounding of a step: of the tokens
    // from this one on, which are a part of it.
    float* normed = nullptr;
    Inputs inputs_from(std::int64_t token) const;

  private:
    std::int64_t widest_;
    Inputs inputs_{};
};

// Some columns of such an array.
TensorRef floats(float* data, std::int64_t rows, std::int64_t columns, std::int64_t stride);

}  // namespace octavo
