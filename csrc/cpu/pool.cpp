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

// Waits for done() inside a run: others are working on it, so this never sleeps, but it soon gives them the core, in
// case they are waiting for it.
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
    static constexpr std::uint32_t kOpen = 1U << 31;

    std::mutex runs;  // held by the thread that runs
    std::vector<std::thread> threads;
    Work work = nullptr;
    const void* context = nullptr;
    std::uint32_t first_phase = 0;
    bool stopping = false;
    alignas(64) std::atomic<std::uint64_t> generation{0};  // of runs
    alignas(64) std::atomic<std::uint32_t> inside{0};  // lanes of other threads in the run, and whether more may come
    std::mutex mutex;
    std::condition_variable wake;
    int sleeping = 0;
    pid_t owner = 0;

    void announce() {
        bool any;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            generation.fetch_add(1, std::memory_order_release);
            any = sleeping > 0;
        }
        if (any) {
            wake.notify_all();
        }
    }

    void stop() {
        stopping = true;
        announce();
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
                ++sleeping;
                wake.wait(lock, [&] { return generation.load(std::memory_order_acquire) != seen; });
                --sleeping;
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

// In a process forked from one that had threads: they are not here, nor what they were doing.
void Pool::forget_parent() {
    if (state_->owner != 0 && state_->owner != getpid()) {
        state_ = new State;
        claim_ = 0;
        done_ = 0;
    }
}

int Pool::size() {
    forget_parent();
    const std::lock_guard<std::mutex> lock(state_->runs);
    return size_ == 0 ? cores() : size_;
}

void Pool::resize(int threads) {
    forget_parent();
    State& state = *state_;
    const std::lock_guard<std::mutex> lock(state.runs);
    state.stop();
    state.owner = getpid();
    size_ = threads > 0 ? threads : cores();
    const std::uint64_t seen = state.generation.load();
    for (int i = 1; i < size_; ++i) {
        state.threads.emplace_back([this, &state, seen] { serve(state, seen); });
    }
}

void Pool::serve(State& state, std::uint64_t seen) {
    for (;;) {
        seen = state.await(seen);
        if (state.stopping) {
            return;
        }
        if (state.inside.fetch_add(1, std::memory_order_acq_rel) & State::kOpen) {
            Lane lane(*this, state.first_phase);
            state.work(state.context, lane);
        }
        state.inside.fetch_sub(1, std::memory_order_release);
    }
}

void Pool::start(Work work, const void* context) {
    if (size_ == 0 || state_->owner != getpid()) {
        resize(size_);
    }
    State& state = *state_;
    const std::lock_guard<std::mutex> lock(state.runs);
    const auto phase = static_cast<std::uint32_t>(claim_.load(std::memory_order_relaxed) >> 32);
    Lane lane(*this, phase);
    if (size_ == 1) {
        work(context, lane);
        return;
    }
    // A lane that came too late for the run before may still be on its way out; it looks at nothing that changes here.
    state.work = work;
    state.context = context;
    state.first_phase = phase;
    state.inside.fetch_or(State::kOpen, std::memory_order_acq_rel);
    state.announce();
    work(context, lane);
    state.inside.fetch_and(~State::kOpen, std::memory_order_acq_rel);
    spin([&] { return state.inside.load(std::memory_order_acquire) == 0; });
}

void Pool::wait(std::uint32_t phase) {
    spin([&] { return claim_.load(std::memory_order_acquire) >> 32 != phase; });
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
