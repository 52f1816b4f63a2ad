// The ranks of a group on one host: processes that compute a step together, in memory that all of them map.
//
// The memory begins with one line for each rank: how often it has come to a meeting. A rank that comes to a meeting
// raises its own number and waits until no other's is less. So all that a rank has written before a meeting can be read
// by all after it. Behind the lines is room for what they tell each other.
//
// The ranks are divided into stages of equal size: neighbours, which compute the same layers. Within a step a stage
// meets alone, and says how many parts of it the next stage may go on with.
//
// A team breaks when a rank has not come for too long, or when one says so: then no meeting waits any more, and what
// was computed since is worth nothing.
#pragma once

#include <chrono>
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
    Team(const TensorRef& memory, int rank, int size, double patience_s, int stages = 1);

    int rank() const { return rank_; }
    int size() const { return size_; }
    int stages() const { return stages_; }
    int stage() const { return rank_ / stage_size(); }
    int stage_size() const { return size_ / stages_; }
    int rank_in_stage() const { return rank_ % stage_size(); }
    double patience_s() const { return patience_s_; }
    char* room() const { return room_; }
    std::int64_t room_bytes() const { return room_bytes_; }

    // False if the team is broken. Only one thread of a rank may call any of them.
    bool meet_in_step();     // the ranks of a stage
    bool meet_all();         // all ranks
    bool meet_for_orders();  // all ranks, for as long as it takes
    void pass_on();          // in the first rank of a stage: one part more is done
    bool wait_for_part();    // until the stage before this one has passed on as many parts as this was called for
    // In rank 0: until the last stage has done as many parts as this stage, but for the `later` last ones.
    bool wait_for_end(std::uint32_t later = 0);
    // What this rank has waited for other hosts.
    void note_waited(std::chrono::nanoseconds passed);

    // From any thread. `why` is one of the numbers of `trouble`.
    void break_off(std::uint32_t why = 1);
    bool broken() const;
    // How long a rank has waited for others within steps, in seconds.
    double waited_s(int rank) const;
    // Why; empty if it is not broken.
    std::string trouble() const;

    // Why it may be broken: a host has left, or is late, or has sent what was not expected.
    static constexpr std::uint32_t kHostGone = 1000, kHostLate = 2000, kHostStrange = 3000;

  private:
    enum Gate { kStep, kAll, kPart, kGates };
    struct Line;
    struct Control;

    bool meet(Gate gate, int first, int count, double patience_s);
    bool wait_for(int other, Gate gate, std::uint32_t number, double patience_s);

    Control* control_;
    char* room_;
    std::int64_t room_bytes_;
    int rank_, size_, stages_;
    double patience_s_;
    std::uint32_t met_[kGates] = {};
    std::uint32_t begun_ = 0;  // parts
};

}  // namespace octavo
