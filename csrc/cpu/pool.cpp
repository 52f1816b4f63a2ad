#include "octavo/pool.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

void relax() {
#if defined(__x86_64__) || defined(__i386__)
    _mm_pause();
#else
    std::this_thread::yield();
#endif
}

// Waits for done() inside a run: the others are working, so this never sleeps, but it lets others have the core when
// they take long (on a busy machine one of them may not be running at all).
template <typename Done>
void spin(Done&& done) {
    for (int turn = 0; !done(); ++turn) {
        if (turn < 2000) {
            relax();
        } else {
            sched_yield();
        }
    }
}

constexpr auto kSpin = std::chrono::microseconds(60);

int cores() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        return std::max(1, CPU_COUNT(&set));
    }
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

struct Scratch {
    float* data = nullptr;
    std::int64_t floats = 0;
    ~Scratch() { std::free(data); }
};

thread_local Scratch own_scratch;

}  // namespace

struct Pool::State {
    std::mutex runs;  // held by the thread that runs
    std::vector<std::thread> threads;
    Work work = nullptr;
    const void* context = nullptr;
    bool stopping = false;
    alignas(64) std::atomic<std::uint64_t> generation{0};
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<std::uint64_t> phase{0};
    std::mutex mutex;
    std::condition_variable wake;
    pid_t owner = 0;

    void stop() {
        {
            const std::lock_guard<std::mutex> lock(mutex);
            stopping = true;
            generation.fetch_add(1);
        }
        wake.notify_all();
        for (std::thread& thread : threads) {
            thread.join();
        }
        threads.clear();
        stopping = false;
    }

    // Waits for a generation other than `seen`: spins, then sleeps.
    std::uint64_t await(std::uint64_t seen) {
        const auto limit = std::chrono::steady_clock::now() + kSpin;
        std::uint64_t now;
        while ((now = generation.load(std::memory_order_acquire)) == seen) {
            for (int turn = 0; turn < 64; ++turn) {
                relax();
            }
            if (std::chrono::steady_clock::now() > limit) {
                std::unique_lock<std::mutex> lock(mutex);
                wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen; });
            }
        }
        return now;
    }
};

Pool& Pool::instance() {
    static Pool* pool = new Pool;  // never destroyed: its threads may outlive static objects
    return *pool;
}

Pool::Pool() : state_(new State) {}
Pool::~Pool() { delete state_; }

int Pool::size() {
    const std::lock_guard<std::mutex> lock(state_->runs);
    return size_ == 0 ? cores() : size_;
}

void Pool::resize(int threads) {
    const std::lock_guard<std::mutex> lock(state_->runs);
    State& state = *state_;
    if (state.owner == getpid()) {
        state.stop();
    } else {
        state_ = new State;  // of the process this one was forked from; its threads are not here
        state_->runs.lock();
    }
    State& fresh = *state_;
    fresh.owner = getpid();
    size_ = threads > 0 ? threads : cores();
    std::uint64_t seen = fresh.generation.load();
    for (int index = 1; index < size_; ++index) {
        fresh.threads.emplace_back([this, &fresh, index, seen]() mutable {
            for (;;) {
                seen = fresh.await(seen);
                if (fresh.stopping) {
                    return;
                }
                Lane lane(*this, index);
                fresh.work(fresh.context, lane);
                barrier();
            }
        });
    }
    if (&fresh != &state) {
        fresh.runs.unlock();
    }
}

void Pool::start(Work work, const void* context) {
    if (size_ == 0 || state_->owner != getpid()) {
        resize(size_);
    }
    const std::lock_guard<std::mutex> lock(state_->runs);
    State& state = *state_;
    Lane lane(*this, 0);
    if (size_ > 1) {
        {
            const std::lock_guard<std::mutex> wakers(state.mutex);
            state.work = work;
            state.context = context;
            next_.store(0, std::memory_order_relaxed);
            state.generation.fetch_add(1, std::memory_order_release);
        }
        state.wake.notify_all();
    }
    work(context, lane);
    if (size_ > 1) {
        barrier();
    }
}

void Pool::barrier() {
    State& state = *state_;
    const std::uint64_t phase = state.phase.load(std::memory_order_acquire);
    if (state.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
        state.arrived.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        state.phase.fetch_add(1, std::memory_order_release);
        return;
    }
    spin([&] { return state.phase.load(std::memory_order_acquire) != phase; });
}

float* Lane::scratch(std::int64_t floats) {
    Scratch& mine = own_scratch;
    if (mine.floats < floats) {
        std::free(mine.data);
        mine.floats = (floats + 1023) / 1024 * 1024;
        mine.data = static_cast<float*>(std::aligned_alloc(64, static_cast<std::size_t>(mine.floats) * sizeof(float)));
        if (mine.data == nullptr) {
            std::abort();  // out of memory within a kernel: nothing sensible is left to do
        }
    }
    return mine.data;
}

}  // namespace octavo
