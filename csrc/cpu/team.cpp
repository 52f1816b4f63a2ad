#include "octavo/team.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
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
    Word met;       // how often its rank has come
    Word sleepers;  // who sleep until it comes
};

struct Team::Control {
    Line lines[kMostRanks];
    alignas(64) Word broken;  // 1: said so; 2 + r: rank r did not come
};

Team::Team(const TensorRef& memory, int rank, int size, double patience_s)
    : control_(memory.as<Control>()),
      room_(memory.as<char>() + kControlBytes),
      room_bytes_(0),
      rank_(rank),
      size_(size),
      patience_s_(patience_s) {
    static_assert(sizeof(Control) <= kControlBytes, "the lines have their room");
    expect(memory, "memory", {kAny}, DType::kU8);
    require(memory.shape[0] > kControlBytes, "memory", "has no room behind its lines");
    require(reinterpret_cast<std::uintptr_t>(memory.data) % 64 == 0, "memory", "does not begin at a line of the cache");
    require(size >= 1 && size <= kMostRanks, "size", "is not a number of ranks");
    require(rank >= 0 && rank < size, "rank", "is not one of the ranks");
    require(patience_s > 0, "patience_s", "is not positive");
    room_bytes_ = memory.shape[0] - kControlBytes;
}

bool Team::broken() const { return control_->broken.load(std::memory_order_relaxed) != 0; }

std::string Team::trouble() const {
    const std::uint32_t why = control_->broken.load(std::memory_order_relaxed);
    return why == 0   ? ""
           : why == 1 ? "a rank has ended"
                      : "rank " + std::to_string(why - 2) + " has not come to a meeting for too long";
}

void Team::break_off() {
    std::uint32_t whole = 0;
    control_->broken.compare_exchange_strong(whole, 1);
    for (int rank = 0; rank < size_; ++rank) {
        wake_all(control_->lines[rank].met);
    }
}

bool Team::meet(double patience_s) {
    Line& mine = control_->lines[rank_];
    mine.met.store(++met_, std::memory_order_seq_cst);
    if (mine.sleepers.load(std::memory_order_seq_cst) != 0) {
        wake_all(mine.met);
    }
    for (int step = 1; step < size_; ++step) {
        if (!wait_for((rank_ + step) % size_, met_, patience_s)) {
            return false;
        }
    }
    return true;
}

// No patience: without end.
bool Team::wait_for(int other, std::uint32_t number, double patience_s) {
    Line& line = control_->lines[other];
    const auto came = [&] { return !before(line.met.load(std::memory_order_acquire), number); };
    for (int turn = 0; turn < kSpins + kYields; ++turn) {
        if (came()) {
            return !broken();
        }
        turn < kSpins ? relax() : static_cast<void>(sched_yield());
    }
    // Time in which all processes were stopped is nobody's delay: so naps are counted, and no clock is read.
    double waited_s = 0;
    while (!came()) {
        if (broken()) {
            return false;
        }
        if (patience_s > 0 && waited_s > patience_s) {
            std::uint32_t whole = 0;
            control_->broken.compare_exchange_strong(whole, static_cast<std::uint32_t>(2 + other));
            break_off();
            return false;
        }
        line.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const std::uint32_t seen = line.met.load(std::memory_order_seq_cst);
        if (before(seen, number)) {
            waited_s += sleep_while(line.met, seen) ? kNapNs * 1e-9 : 0;
        }
        line.sleepers.fetch_sub(1, std::memory_order_relaxed);
    }
    return !broken();
}

}  // namespace octavo
