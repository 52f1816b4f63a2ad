// What pool.h promises, put to the test: each promise is a function here, and main runs the one it is told. Ordinary
// variables carry what one thread tells another, so that ThreadSanitizer sees a missing order even where the values are
// right by luck. Where a broken promise shows only if a thread is slow, a thread is.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "octavo/pool.h"

namespace {

using octavo::Pool;
using octavo::PoolThread;

constexpr int kThreads = 3;

void require(bool kept, const char* promise) {
    if (!kept) {
        std::fprintf(stderr, "broken: %s\n", promise);
        std::_Exit(1);  // other threads may be anywhere
    }
}

void dawdle() { std::this_thread::sleep_for(std::chrono::milliseconds(10)); }

// A phase with a part for every thread, in which all meet. Returns the part this thread had.
int meet(PoolThread& thread) {
    static std::atomic<int> come{0};
    thread_local int part = -1;
    thread.each(kThreads, [&](std::int64_t i) {
        part = static_cast<int>(i);
        const int round = come.fetch_add(1) / kThreads;
        while (come.load() < (round + 1) * kThreads) {
            std::this_thread::yield();
        }
    });
    return part;
}

// After a phase, every thread sees what all of its parts have written.
void phases_wait() {
    Pool::instance().resize(kThreads);
    std::vector<int> written(kThreads);
    for (int round = 1; round <= 10; ++round) {
        Pool::instance().run([&](PoolThread& thread) {
            bool last = false;
            meet(thread);
            thread.each(kThreads, [&](std::int64_t i) {
                last = i == 0;
                if (last) {
                    dawdle();
                }
                written[static_cast<std::size_t>(i)] = round;
            });
            for (const int value : written) {
                require(value == round, "a phase is over when its parts are done");
            }
            if (last) {
                dawdle();  // that the others see the phase's end, and not what this thread does after it
            }
            meet(thread);  // all have looked
        });
    }
}

// After a run, its threads have left it, and what they wrote is seen.
void runs_wait() {
    Pool::instance().resize(kThreads);
    std::vector<int> left(kThreads);
    for (int round = 1; round <= 10; ++round) {
        const std::thread::id caller = std::this_thread::get_id();
        Pool::instance().run([&](PoolThread& thread) {
            const int part = meet(thread);
            if (std::this_thread::get_id() != caller) {
                dawdle();
            }
            left[static_cast<std::size_t>(part)] = round;
        });
        for (const int value : left) {
            require(value == round, "a run is over when all have returned");
        }
    }
}

// Who comes too late for a run stays out of it: runs too short for anybody to come in time.
void late_threads_stay_out() {
    Pool::instance().resize(kThreads);
    std::atomic<int> on{0};
    for (int round = 1; round <= 3000; ++round) {
        on.store(round);
        Pool::instance().run(
            [&, round](PoolThread&) { require(on.load() == round, "a thread that comes late stays out"); });
        on.store(0);
        if (round % 100 == 0) {
            dawdle();  // they fall asleep
        }
    }
}

// Every part of every phase is done once, after all of the phase before: each adds up what that has left.
void parts_are_done_once() {
    std::mt19937 dice(1);
    for (int round = 0; round < 300; ++round) {
        if (round % 50 == 0) {
            Pool::instance().resize(1 + round / 50);
        }
        std::vector<std::vector<int>> done(2 + dice() % 6);
        for (std::vector<int>& phase : done) {
            phase.resize(dice() % 40);
        }
        Pool::instance().run([&](PoolThread& thread) {
            const std::vector<int>* before = nullptr;
            for (std::vector<int>& phase : done) {
                thread.each(static_cast<std::int64_t>(phase.size()), [&](std::int64_t i) {
                    for (std::size_t j = 0; before != nullptr && j < before->size(); ++j) {
                        require((*before)[j] == 1, "phases follow each other");
                    }
                    float* scratch = thread.scratch(1 + 700 * i);
                    scratch[700 * i] = 1;
                    ++phase[static_cast<std::size_t>(i)];
                });
                before = &phase;
            }
        });
        for (const std::vector<int>& phase : done) {
            for (const int count : phase) {
                require(count == 1, "a part is done once");
            }
        }
    }
}

// Several threads run, one resizes, one asks for the size.
void threads_take_turns() {
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
        threads.emplace_back([] {
            for (int round = 0; round < 200; ++round) {
                std::vector<int> done(9);
                Pool::instance().run([&](PoolThread& thread) {
                    thread.each(9, [&](std::int64_t i) { ++done[static_cast<std::size_t>(i)]; });
                    thread.each(9, [&](std::int64_t i) { done[static_cast<std::size_t>(8 - i)] += round; });
                });
                for (const int value : done) {
                    require(value == round + 1, "runs follow each other");
                }
            }
        });
    }
    threads.emplace_back([] {
        for (int round = 0; round < 60; ++round) {
            Pool::instance().resize(1 + round % 4);
        }
    });
    threads.emplace_back([] {
        for (int round = 0; round < 1000; ++round) {
            const int size = Pool::instance().size();
            require(size >= 1, "there is a thread");
        }
    });
    for (std::thread& thread : threads) {
        thread.join();
    }
}

// A process forked at any time has a pool of its own, whatever the parent's is doing.
void forks_have_their_own() {
    Pool::instance().resize(kThreads);
    std::atomic<bool> going{true};
    std::thread busy([&] {
        while (going.load()) {
            Pool::instance().run([](PoolThread& thread) { thread.each(50, [](std::int64_t) {}); });
        }
    });
    for (int round = 0; round < 30; ++round) {
        const pid_t child = fork();
        if (child == 0) {
            alarm(20);  // threads that are not there would be waited for
            std::atomic<int> done{0};
            require(Pool::instance().size() == kThreads, "a fork's pool is as large as its parent's");
            Pool::instance().run([&](PoolThread& thread) {
                meet(thread);
                thread.each(100, [&](std::int64_t) { done.fetch_add(1); });
            });
            std::_Exit(done.load() == 100 ? 0 : 1);
        }
        int status = -1;
        waitpid(child, &status, 0);
        require(status == 0, "a fork has a pool of its own");
    }
    going.store(false);
    busy.join();
}

struct Promise {
    const char* name;
    void (*test)();
};

constexpr Promise kPromises[] = {
    {"phases_wait", phases_wait},
    {"runs_wait", runs_wait},
    {"late_threads_stay_out", late_threads_stay_out},
    {"parts_are_done_once", parts_are_done_once},
    {"threads_take_turns", threads_take_turns},
    {"forks_have_their_own", forks_have_their_own},
};

}  // namespace

int main(int count, char** arguments) {
    for (const Promise& promise : kPromises) {
        if (count == 2 && std::strcmp(arguments[1], promise.name) == 0) {
            alarm(90);
            promise.test();
            Pool::instance().resize(1);
            return 0;
        }
    }
    return 2;
}
