#include "octavo/team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <ctime>
#include <thread>

#include "relax.h"

namespace octavo {
namespace {

using Word = std::atomic<std::uint32_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 4, "processes share it, and the kernel waits on it");

constexpr int kSpins = 300;  // some microseconds: the others are about to come
constexpr int kYields = 8;   // then the core is given to who may be waited for
// Then it sleeps: at most so long, because who breaks off may miss who falls asleep.
constexpr long kNapNs = 50'000'000;

// Whether the whole nap has passed.
bool sleep_while(Word& word, std::uint32_t value) {
    const timespec nap{0, kNapNs};
    return syscall(SYS_futex, &word, FUTEX_WAIT, value, &nap, nullptr, 0) != 0 && errno == ETIMEDOUT;
}

void wake_all(Word& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

bool before(std::uint32_t number, std::uint32_t other) { return static_cast<std::int32_t>(number - other) < 0; }

}  // namespace

struct alignas(64) Team::Line {
    struct {
        Word met;       // how often its rank has come
        Word sleepers;  // who sleep until it comes
    } gates[kGates];
    std::atomic<std::uint64_t> waited_ns;
};

struct Team::Control {
    Line lines[kMostRanks];
    alignas(64) Word broken;  // 1: said so; 2 + r: rank r did not come; or something with a host
};

Team::Team(const TensorRef& memory, int rank, int size, double patience_s, int stages)
    : control_(memory.as<Control>()),
      room_(memory.as<char>() + kControlBytes),
      room_bytes_(0),
      rank_(rank),
      size_(size),
      stages_(stages),
      patience_s_(patience_s) {
    static_assert(sizeof(Control) <= kControlBytes, "the lines have their room");
    expect(memory, "memory", {kAny}, DType::kU8);
    require(memory.shape[0] > kControlBytes, "memory", "has no room behind its lines");
    require(reinterpret_cast<std::uintptr_t>(memory.data) % 64 == 0, "memory", "does not begin at a line of the cache");
    require(size >= 1 && size <= kMostRanks, "size", "is not a number of ranks");
    require(rank >= 0 && rank < size, "rank", "is not one of the ranks");
    require(patience_s > 0, "patience_s", "is not positive");
    require(stages >= 1 && size % stages == 0, "stages", "do not divide the ranks");
    room_bytes_ = memory.shape[0] - kControlBytes;
}

bool Team::broken() const { return control_->broken.load(std::memory_order_relaxed) != 0; }

double Team::waited_s(int rank) const {
    require(rank >= 0 && rank < size_, "rank", "is not one of the ranks");
    return static_cast<double>(control_->lines[rank].waited_ns.load(std::memory_order_relaxed)) * 1e-9;
}

std::string Team::trouble() const {
    const std::uint32_t why = control_->broken.load(std::memory_order_relaxed);
    const auto host = [why](std::uint32_t kind) { return "host " + std::to_string(why - kind); };
    return why == 0   ? ""
           : why == 1 ? "a rank has ended"
           : why >= kHostStrange
               ? host(kHostStrange) + " has sent what is not expected: all hosts need the same version"
           : why >= kHostLate ? host(kHostLate) + " has not answered for too long"
           : why >= kHostGone ? "the connection to " + host(kHostGone) + " has ended"
                              : "rank " + std::to_string(why - 2) + " has not come to a meeting for too long";
}

void Team::break_off(std::uint32_t why) {
    std::uint32_t whole = 0;
    control_->broken.compare_exchange_strong(whole, why);
    for (int rank = 0; rank < size_; ++rank) {
        for (auto& gate : control_->lines[rank].gates) {
            wake_all(gate.met);
        }
    }
}

bool Team::meet_in_step() { return meet(kStep, stage() * stage_size(), stage_size(), patience_s_); }
bool Team::meet_all() { return meet(kAll, 0, size_, patience_s_); }
bool Team::meet_for_orders() { return meet(kAll, 0, size_, 0); }

bool Team::meet(Gate gate, int first, int count, double patience_s) {
    auto& [met, sleepers] = control_->lines[rank_].gates[gate];
    met.store(++met_[gate], std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) != 0) {
        wake_all(met);
    }
    for (int step = 1; step < count; ++step) {
        if (!wait_for(first + (rank_ - first + step) % count, gate, met_[gate], patience_s)) {
            return false;
        }
    }
    return true;
}

void Team::pass_on() { meet(kPart, rank_, 1, patience_s_); }

bool Team::wait_for_part() {
    ++begun_;
    return stage() == 0 || wait_for((stage() - 1) * stage_size(), kPart, begun_, patience_s_);
}

bool Team::wait_for_end(std::uint32_t later) {
    return wait_for((stages_ - 1) * stage_size(), kPart, begun_ - later, patience_s_);
}

void Team::note_waited(std::chrono::nanoseconds passed) {
    control_->lines[rank_].waited_ns.fetch_add(static_cast<std::uint64_t>(passed.count()), std::memory_order_relaxed);
}

// No patience: without end.
bool Team::wait_for(int other, Gate gate, std::uint32_t number, double patience_s) {
    auto& [met, sleepers] = control_->lines[other].gates[gate];
    const auto came = [&met = met, number] { return !before(met.load(std::memory_order_acquire), number); };
    for (int turn = 0; turn < kSpins; ++turn) {
        if (came()) {
            return !broken();
        }
        relax();
    }
    const auto began = std::chrono::steady_clock::now();
    for (int turn = 0; turn < kYields && !came(); ++turn) {
        sched_yield();
    }
    // Time in which all processes were stopped is nobody's delay: so naps are counted, and no clock is read.
    double waited_s = 0;
    while (!came()) {
        if (broken()) {
            return false;
        }
        if (patience_s > 0 && waited_s > patience_s) {
            break_off(static_cast<std::uint32_t>(2 + other));
            return false;
        }
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        const std::uint32_t seen = met.load(std::memory_order_seq_cst);
        if (before(seen, number)) {
            waited_s += sleep_while(met, seen) ? kNapNs * 1e-9 : 0;
        }
        sleepers.fetch_sub(1, std::memory_order_relaxed);
    }
    if (patience_s > 0) {
        note_waited(std::chrono::steady_clock::now() - began);
    }
    return !broken();
}

}  // namespace octavo
