// What the front of a group wants of all ranks: a step, or the logits of some rows. It lies at the beginning of the
// team's room, and goes to other hosts as the bytes that it is.
#pragma once

#include "octavo/api.h"
#include "octavo/team.h"

namespace octavo {

struct TeamStep {
    TensorRef token_ids, positions, slots;  // i64 [t]
    BatchRef batch;
    TensorRef rows;       // i64 [r]: tokens whose hidden state is wanted
    TensorRef lora_rows;  // i64 [m]: tokens that run with an adapter, those of each one after another; each once
    // i64 [g, 3], in an order: of each of these adapters its number and its place (LoraRoom), and how many tokens.
    TensorRef lora_groups;
};

enum class Order : std::int64_t { kForward, kLogits };

class TeamOrder {
  public:
    static constexpr std::int64_t kRows = 64;  // of logits, at once

    // A step has at most so many tokens, and so many bytes of plan.
    TeamOrder(const Team& team, std::int64_t tokens, std::int64_t plan_bytes);
    static std::int64_t room_bytes(std::int64_t plan_bytes);

    // Before a meeting: what all are to do after it. ArgumentError for a step that has no room.
    void order_forward(const TeamStep& step);
    void order_logits(std::int64_t rows);
    // The same as bytes, for other hosts.
    char* order_data() const;
    std::int64_t order_bytes() const;
    std::int64_t most_order_bytes() const;
    bool order_has_room() const;  // of what another host has sent

    // After it.
    Order order() const;
    TeamStep step() const;      // kForward
    std::int64_t rows() const;  // kLogits

  private:
    struct Header;

    static std::int64_t plan_bytes_of(const Header& header);

    Header* header_;
    char* plan_;
    std::int64_t tokens_, plan_bytes_;
};

}  // namespace octavo
