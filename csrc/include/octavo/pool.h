// The threads ops run on: one team per process, kept between calls.
//
// A phase (`each`) is over when its parts are done, not when all lanes have come: a lane whose thread is not running,
// because others need the core, holds nobody up unless it is within a part. It catches up by passing over what is over.
// Between phases lanes spin, because the next one is microseconds away; after a run they soon sleep.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace octavo {

class Pool;

// One thread's part in a run. All lanes of a run call `each` in the same order with the same counts.
class Lane {
  public:
    // Calls body(i) for every i in [0, count), each in some lane, and returns in every lane when all are done.
    template <typename Body>
    void each(std::int64_t count, const Body& body);

    // Memory of this lane's own, 64-byte aligned, overwritten by the next call.
    float* scratch(std::int64_t floats);

  private:
    friend class Pool;
    Lane(Pool& pool, std::uint32_t phase) : pool_(pool), phase_(phase) {}
    Pool& pool_;
    std::uint32_t phase_;
};

class Pool {
  public:
    static Pool& instance();

    // How many lanes a run has, this thread's included. 0: one per core this process may use. Not while a run is on.
    void resize(int threads);
    int size();

    // Runs body(lane) in this thread and in those others that come in time, and returns when all have returned. The
    // body must not throw. Runs of several threads follow each other.
    template <typename Body>
    void run(const Body& body) {
        start([](const void* context, Lane& lane) { (*static_cast<const Body*>(context))(lane); }, &body);
    }

  private:
    friend class Lane;
    using Work = void (*)(const void*, Lane&);
    struct State;

    Pool();
    void start(Work work, const void* context);
    void forget_parent();
    void serve(State& state, std::uint64_t seen);
    void wait(std::uint32_t phase);

    State* state_;
    int size_ = 0;
    // The phase that is on, and its next part: phase << 32 | part. Phases wrap around; only equality matters.
    alignas(64) std::atomic<std::uint64_t> claim_{0};
    alignas(64) std::atomic<std::int64_t> done_{0};  // parts of it that are
};

template <typename Body>
void Lane::each(std::int64_t count, const Body& body) {
    if (count <= 0) {
        return;
    }
    if (pool_.size_ == 1) {
        for (std::int64_t i = 0; i < count; ++i) {
            body(i);
        }
        return;
    }
    const std::uint32_t phase = phase_++;
    std::uint64_t claim = pool_.claim_.load(std::memory_order_acquire);
    for (;;) {
        const auto part = static_cast<std::int64_t>(claim & 0xffffffffU);
        if (claim >> 32 != phase || part >= count) {
            break;
        }
        if (!pool_.claim_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel)) {
            continue;
        }
        body(part);
        if (pool_.done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
            pool_.done_.store(0, std::memory_order_relaxed);
            pool_.claim_.store(static_cast<std::uint64_t>(phase + 1) << 32, std::memory_order_release);
            return;
        }
        claim = pool_.claim_.load(std::memory_order_acquire);
    }
    pool_.wait(phase);
}

}  // namespace octavo
