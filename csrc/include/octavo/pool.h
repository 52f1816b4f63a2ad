// The threads that ops run on: one team per process, kept between calls.
//
// A phase (`each`) ends when its parts are done, not when all threads have come. A thread whose thread is not running,
// because others need the core, delays the phase only while it is within a part. It catches up by passing over phases
// that have ended. Between phases threads spin, because the next one is microseconds away; after a run they soon sleep.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace octavo {

class Pool;

// One thread's part in a run. All threads of a run call `each` in the same order with the same counts.
class PoolThread {
  public:
    // Calls body(i) for every i in [0, count), each in some thread, and returns in every thread when all are done.
    template <typename Body>
    void each(std::int64_t count, const Body& body);

    // Memory that belongs to this thread, 64-byte aligned. The next call overwrites it.
    float* scratch(std::int64_t floats);

  private:
    friend class Pool;
    PoolThread(Pool& pool, std::uint64_t phase, bool alone) : pool_(pool), phase_(phase), alone_(alone) {}
    Pool& pool_;
    std::uint64_t phase_;  // the claim its next phase begins with
    const bool alone_;
};

class Pool {
  public:
    static Pool& instance();

    // Sets how many threads a run has, this thread's included; 0: one per core that the process may use. It waits for
    // the end of a run, so a body must not call it.
    void resize(int threads);
    int size() const;

    // Runs body(thread) in this thread and in those others that come in time, and returns when all have returned. The
    // body must not throw. Runs of several threads follow each other.
    template <typename Body>
    void run(const Body& body) {
        start([](const void* context, PoolThread& thread) { (*static_cast<const Body*>(context))(thread); }, &body);
    }

  private:
    friend class PoolThread;
    using Work = void (*)(const void*, PoolThread&);
    struct State;
    static constexpr std::uint64_t kPhase = std::uint64_t{1} << 40;  // more than the parts of any phase

    Pool();
    void start(Work work, const void* context);
    void recruit(int threads);
    void serve();
    void forget_parent();
    void wait(std::uint64_t phase);

    State* state_;  // changes in a forked process alone, before it has a second thread
    // The next part to be taken: kPhase times the current phase, plus the part. Phases wrap around; within a run only
    // their order matters.
    alignas(64) std::atomic<std::uint64_t> claim_{0};
    alignas(64) std::atomic<std::int64_t> done_{0};  // parts of the phase that are done
};

template <typename Body>
void PoolThread::each(std::int64_t count, const Body& body) {
    if (count <= 0) {
        return;
    }
    if (alone_) {
        for (std::int64_t i = 0; i < count; ++i) {
            body(i);
        }
        return;
    }
    const std::uint64_t phase = phase_;
    phase_ += Pool::kPhase;
    std::uint64_t claim = pool_.claim_.load(std::memory_order_acquire);
    while (claim - phase < static_cast<std::uint64_t>(count)) {
        if (!pool_.claim_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) {
            continue;
        }
        body(static_cast<std::int64_t>(claim - phase));
        // Releases what this part wrote. The thread that does the last part acquires what all parts wrote, and releases
        // it to the threads of the next phase with the claim.
        if (pool_.done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
            pool_.done_.store(0, std::memory_order_relaxed);
            pool_.claim_.store(phase + Pool::kPhase, std::memory_order_release);
            return;
        }
        claim = pool_.claim_.load(std::memory_order_acquire);
    }
    pool_.wait(phase);
}

}  // namespace octavo
