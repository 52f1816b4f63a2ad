#include "octavo/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "relax.h"

namespace octavo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kLent = std::chrono::milliseconds(2);  // nobody who shares the work of a token keeps a core for longer
constexpr int kRest = 64;                             // times as long as a core was kept, it is lent no more

// Lends the core to whoever waits for it, at a moment when this thread has no part that the others would have to wait
// for. What a token needs besides its step (journal, router, client) takes a fraction of a millisecond at a time. A
// program that computes takes a whole time slice, and then it has to wait for its next ones as everywhere else.
void lend_core() {
    thread_local Clock::time_point not_before{};
    const Clock::time_point began = Clock::now();
    if (began < not_before) {
        return;
    }
    sched_yield();
    const Clock::time_point ended = Clock::now();
    if (ended - began > kLent) {
        not_before = ended + kRest * (ended - began);
    }
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

constexpr auto kSpin = std::chrono::microseconds(200);  // most pauses between two steps of an engine are shorter

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
    static constexpr std::uint64_t kOver = ~std::uint64_t{0};

    std::mutex runs;  // held by who runs or recruits: `threads` and `recruited` are theirs
    std::vector<std::thread> threads;
    bool recruited = false;
    std::atomic<int> size{0};  // 0: not yet decided

    // The run. Who holds `runs` writes it while no other thread is inside; a thread reads it when its entry into
    // `inside` found kOpen, which was set after that.
    Work work = nullptr;
    const void* context = nullptr;
    std::uint64_t phase = 0;
    alignas(64) std::atomic<std::uint32_t> inside{0};  // threads of other threads in the run, and whether more may come

    alignas(64) std::atomic<std::uint64_t> generation{0};  // of runs; kOver: threads shall end. Changes under `mutex`
    std::mutex mutex;
    std::condition_variable wake;
    int sleeping = 0;  // under `mutex`

    void announce(std::uint64_t next) {
        bool any;
        {
            const std::lock_guard<std::mutex> lock(mutex);
            generation.store(next, std::memory_order_release);
            any = sleeping > 0;
        }
        if (any) {
            wake.notify_all();
        }
    }

    void dismiss() {
        announce(kOver);
        for (std::thread& thread : threads) {
            thread.join();
        }
        threads.clear();
        generation.store(0, std::memory_order_relaxed);
    }

    // Waits for a generation other than `seen`: spins while nobody else wants the core, then sleeps.
    std::uint64_t await(std::uint64_t seen) {
        const auto limit = Clock::now() + kSpin;
        std::uint64_t now;
        while ((now = generation.load(std::memory_order_acquire)) == seen) {
            for (int turn = 0; turn < 64; ++turn) {
                relax();
            }
            lend_core();
            if (Clock::now() > limit) {
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
    static const int forked = pthread_atfork(nullptr, nullptr, [] { pool->forget_parent(); });
    if (forked != 0) {
        throw std::bad_alloc();
    }
    return *pool;
}

Pool::Pool() : state_(new State) {}

// In a forked process, before it does anything else: the threads are not here, nor what they were doing.
void Pool::forget_parent() {
    const int size = state_->size.load(std::memory_order_relaxed);
    state_ = new State;
    state_->size.store(size, std::memory_order_relaxed);
    claim_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
}

int Pool::size() const {
    const int size = state_->size.load(std::memory_order_relaxed);
    return size == 0 ? cores() : size;
}

void Pool::resize(int threads) {
    const std::lock_guard<std::mutex> lock(state_->runs);
    recruit(threads);
}

void Pool::recruit(int threads) {
    State& state = *state_;
    state.recruited = false;  // should a thread not start
    state.dismiss();
    const int size = threads > 0 ? threads : cores();
    state.size.store(size, std::memory_order_relaxed);
    for (int i = 1; i < size; ++i) {
        state.threads.emplace_back([this] { serve(); });
    }
    state.recruited = true;
}

void Pool::serve() {
    State& state = *state_;
    std::uint64_t seen = 0;
    while ((seen = state.await(seen)) != State::kOver) {
        if (state.inside.fetch_add(1, std::memory_order_acq_rel) & State::kOpen) {
            PoolThread thread(*this, state.phase, false);
            state.work(state.context, thread);
        }
        state.inside.fetch_sub(1, std::memory_order_release);
    }
}

void Pool::start(Work work, const void* context) {
    State& state = *state_;
    const std::lock_guard<std::mutex> lock(state.runs);
    if (!state.recruited) {
        recruit(state.size.load(std::memory_order_relaxed));
    }
    const std::uint64_t phase = claim_.load(std::memory_order_relaxed);
    PoolThread thread(*this, phase, state.threads.empty());
    if (state.threads.empty()) {
        work(context, thread);
        return;
    }
    // A thread that came too late for the run before may still be on its way out; it looks at nothing that changes
    // here.
    state.work = work;
    state.context = context;
    state.phase = phase;
    state.inside.fetch_or(State::kOpen, std::memory_order_acq_rel);
    state.announce(state.generation.load(std::memory_order_relaxed) + 1);
    work(context, thread);
    state.inside.fetch_and(~State::kOpen, std::memory_order_acq_rel);
    spin([&] { return state.inside.load(std::memory_order_acquire) == 0; });
}

void Pool::wait(std::uint64_t phase) {
    lend_core();
    spin([&] { return claim_.load(std::memory_order_acquire) - phase >= kPhase; });
}

float* PoolThread::scratch(std::int64_t floats) {
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
