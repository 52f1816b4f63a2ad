// Threads, warps, blocks and grids on a CPU: each thread is a fiber. Whatever needs several threads is a rendezvous: a
// lane waits there until all lanes of its warp (or threads of its block) have come to the same one, and then it happens
// for all. runtime.cpp says in which order everything runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace octavo::simt {

constexpr int kLanes = 32;

struct Copy {
    void* to;
    const void* from;
    bool valid;
};

struct Warp {
    void* operands[kLanes];
    const char* what = nullptr;  // the rendezvous it is at
    int arrived = 0;
};

struct Block;

struct Fiber {
    enum State { kReady, kWaiting, kDone };
    void* stack_pointer = nullptr;
    unsigned char* stack = nullptr;
    Block* block = nullptr;
    Warp* warp = nullptr;
    dim3 thread;
    int lane = 0;
    State state = kReady;
    std::vector<std::vector<Copy>> groups;  // closed groups of asynchronous copies on their way
    std::vector<Copy> open;
};

// What a launch runs in each of its threads.
struct Body {
    void (*call)(const void* arguments);
    const void* arguments;
};

struct Block {
    dim3 index, grid, size;
    unsigned char* shared = nullptr;
    std::size_t shared_bytes = 0;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Body body{};
    int arrived = 0, alive = 0;
};

extern Fiber* self;          // the thread that runs: one operating-system thread runs kernels at a time
extern std::mt19937 chance;  // whatever a device leaves open is decided by it

[[noreturn]] void die(const char* what, const char* more = "", const char* still_more = "");

// Waits until all lanes of the warp are at `what`, then calls `execute` with the operands of all.
void rendezvous(const char* what, void* operands, void (*execute)(void** operands));
void block_barrier();
void run_grid(dim3 grid, int threads, std::size_t shared_bytes, Body body);

}  // namespace octavo::simt
