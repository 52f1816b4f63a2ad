// What the ranks of a decoder tell each other: what rank 0 wants, and the activations that all read.
#pragma once

#include "octavo/llama.h"

namespace octavo {

enum class Order : std::int64_t { kForward, kLogits };

class TeamRoom {
  public:
    static constexpr std::int64_t kRows = 64;  // of logits, at once

    TeamRoom(const Team& team, const LlamaSizes& sizes, std::int64_t tokens, std::int64_t plan_bytes);
    static std::int64_t bytes(const LlamaSizes& sizes, std::int64_t tokens, std::int64_t plan_bytes);
    // Floats of a token's inner state, in whatever layer.
    static std::int64_t inner_of(const LlamaSizes& sizes) {
        return sizes.inner > sizes.asked_inner ? sizes.inner : sizes.asked_inner;
    }

    // Before a meeting: what all are to do after it. ArgumentError for a step that has no room.
    void order_forward(const LlamaStep& step);
    void order_logits(std::int64_t rows);
    // The same as bytes, for other hosts.
    char* order_data() const;
    std::int64_t order_bytes() const;
    std::int64_t most_order_bytes() const;
    bool order_has_room() const;  // of what another host has sent

    // After it.
    Order order() const;
    LlamaStep step() const;     // kForward
    std::int64_t rows() const;  // kLogits

    // [tokens, hidden], [tokens, heads head_dim], [tokens, inner_of(sizes)], [kRows, hidden], [kRows, vocab]
    float *x = nullptr, *attended = nullptr, *inner = nullptr, *hidden = nullptr, *logits = nullptr;
    // [tokens, heads head_dim], [tokens, kv_heads head_dim]: of a layer that norms those of all heads together
    float *queries = nullptr, *keys = nullptr;

  private:
    struct Header;

    static std::int64_t plan_bytes_of(const Header& header);

    Header* header_;
    char* plan_;
    std::int64_t tokens_, plan_bytes_;
};

}  // namespace octavo
