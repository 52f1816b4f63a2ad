// The threads ops run on: one team per process, kept between calls. It spins for a moment between phases, because the
// next one is microseconds away, and sleeps when nothing comes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace octavo {

class Pool;

// One thread's part in a run. All lanes of a run call `each` in the same order.
class Lane {
  public:
    // Calls body(i) for every i in [0, count), each in some lane, and returns in all lanes when all are done.
    template <typename Body>
    void each(std::int64_t count, Body&& body);

    // Memory of this lane's own, 64-byte aligned, overwritten by the next call.
    float* scratch(std::int64_t floats);

    const int index;

  private:
    friend class Pool;
    Lane(Pool& pool, int place) : index(place), pool_(pool) {}
    Pool& pool_;
};

class Pool {
  public:
    static Pool& instance();

    // How many lanes a run has, this thread's included. 0: one per core this process may use. Not while a run is on.
    void resize(int threads);
    int size();

    // Runs body(lane) in every lane and returns when all have returned. The body must not throw. Runs of several
    // threads follow each other.
    template <typename Body>
    void run(const Body& body) {
        start([](const void* context, Lane& lane) { (*static_cast<const Body*>(context))(lane); }, &body);
    }

  private:
    friend class Lane;
    using Work = void (*)(const void*, Lane&);
    struct State;

    Pool();
    ~Pool();
    void start(Work work, const void* context);
    void barrier();

    State* state_;
    int size_ = 0;
    alignas(64) std::atomic<std::int64_t> next_{0};
};

template <typename Body>
void Lane::each(std::int64_t count, Body&& body) {
    if (pool_.size_ == 1) {
        for (std::int64_t i = 0; i < count; ++i) {
            body(i);
        }
        return;
    }
    if (count == 1) {
        if (index == 0) {
            body(std::int64_t{0});
        }
    } else {
        for (std::int64_t i; (i = pool_.next_.fetch_add(1, std::memory_order_relaxed)) < count;) {
            body(i);
        }
    }
    pool_.barrier();
}

}  // namespace octavo
