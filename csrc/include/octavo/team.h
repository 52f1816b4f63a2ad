// The ranks of a group on one host: processes that compute a step together, in memory that all of them map.
//
// The memory begins with one line for each rank: how often it has come to a meeting. A rank that comes to a meeting
// raises its own number and waits until no other's is less. So all that a rank has written before a meeting can be read
// by all after it. Behind the lines is room for what they tell each other.
//
// A team breaks when a rank has not come for too long, or when one says so: then no meeting waits any more, and what
// was computed since is worth nothing.
#pragma once

#include <cstdint>
#include <string>

#include "octavo/tensor.h"

namespace octavo {

class Team {
  public:
    static constexpr int kMostRanks = 64;
    static constexpr std::int64_t kControlBytes = 8192;

    // memory u8 [bytes]: the same zeros for all ranks at the beginning. patience_s: how long a meeting within a step
    // waits for a rank.
    Team(const TensorRef& memory, int rank, int size, double patience_s);

    int rank() const { return rank_; }
    int size() const { return size_; }
    char* room() const { return room_; }
    std::int64_t room_bytes() const { return room_bytes_; }

    // False if the team is broken. Only one thread of a rank may call either.
    bool meet_in_step() { return meet(patience_s_); }
    bool meet_for_orders() { return meet(0); }  // waits for as long as it takes

    // From any thread.
    void break_off();
    bool broken() const;
    // Why; empty if it is not broken.
    std::string trouble() const;

  private:
    struct Line;
    struct Control;

    bool meet(double patience_s);
    bool wait_for(int other, std::uint32_t number, double patience_s);

    Control* control_;
    char* room_;
    std::int64_t room_bytes_;
    int rank_, size_;
    double patience_s_;
    std::uint32_t met_ = 0;
};

}  // namespace octavo
