// Threads, warps, blocks and grids on a CPU: each thread is a fiber. Whatever needs several threads is a rendezvous: a
// lane waits there until all lanes of its warp (or threads of its block) have come to the same one, and then it happens
// for all. runtime.cpp says in which order everything runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <random>
#include <vector>

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace octavo::simt {

constexpr int kLanes = 32;

// An asynchronous copy of 16 bytes.
struct Copy {
    void* to;
    const void* from;
    bool valid, arrived;
};

struct Warp {
    void* operands[kLanes];
    const char* what = nullptr;  // the rendezvous it is at
    std::uintptr_t site = 0;     // where in the code, of an instruction that all lanes must execute together
    int arrived = 0;
    int asleep = 0;              // steps of others that it lets pass
    int at_barrier = 0;          // lanes that wait at the block's barrier
    std::uint32_t barriers = 0;  // __syncwarp so far
};

struct Block;
struct Fiber;

// A barrier in shared memory (mbarrier). A phase ends when all arrivals and all bytes that were expected have come.
struct Barrier {
    int count = 0, pending = 0;
    std::int64_t bytes = 0;  // expected, and not there yet
    unsigned phase = 0;
    const Fiber* maker = nullptr;
    std::uint32_t made_at = 0;  // after so many barriers of the thread block
    bool published = false;     // to copies in bulk
};
struct BulkCopy {
    void* to;
    const void* from;
    std::size_t bytes;
    Barrier* barrier;
};

struct Fiber {
    enum State { kReady, kWaiting, kSpinning, kDone };
    void* stack_pointer = nullptr;
    unsigned char* stack = nullptr;
    Block* block = nullptr;
    Warp* warp = nullptr;
    dim3 thread;
    int lane = 0;
    State state = kReady;
    std::vector<std::vector<Copy>> groups;  // closed groups of asynchronous copies on their way
    std::vector<Copy> open;
    const Barrier* spins_at = nullptr;
    unsigned spins_for = 0;  // the parity of the phase that must end
};

// What a launch runs in each of its threads.
struct Body {
    void (*call)(const void* arguments);
    const void* arguments;
};

// Who has waited for the copy of 16 bytes of shared memory, and between which barriers.
struct Arrival {
    const Fiber* by = nullptr;  // null: no copy came here
    bool waited = false;
    std::uint32_t block_barriers = 0, warp_barriers = 0;
};

struct Block {
    dim3 index, grid, size;
    unsigned char* shared = nullptr;
    std::size_t shared_bytes = 0;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    std::vector<Arrival> arrivals;  // of each 16 bytes of shared memory, once there was a copy
    std::map<void*, Barrier> shared_barriers;
    std::vector<BulkCopy> bulk;  // on their way
    Body body{};
    int arrived = 0, alive = 0;
    std::uint32_t barriers = 0;  // __syncthreads so far
};

extern Fiber* self;          // the thread that runs: one operating-system thread runs kernels at a time
extern std::mt19937 chance;  // whatever a device leaves open is decided by it

[[noreturn]] void die(const char* what, const char* more = "", const char* still_more = "");

enum class Lanes { kAnywhere, kTogether };

// Waits until all lanes of the warp are at `what`, then calls `execute` with the operands of all. kTogether: the
// instruction is .aligned, so all lanes must have come to it by the same calls.
void rendezvous(Lanes lanes, const char* what, void* operands, void (*execute)(void** operands));
void block_barrier();
// Ends the phase if nothing is missing.
void end_phase(Barrier& barrier);
// Waits until the phase of that parity has ended.
void spin(const Barrier& barrier, unsigned parity);
void run_grid(dim3 grid, int threads, std::size_t shared_bytes, Body body);

// What is known of the 16 bytes of shared memory at `p`, which copies bring; null if it lies elsewhere.
Arrival* arrival_at(const void* p);
// Ends the process unless all lanes of the warp that runs may read what was copied there.
void require_arrived(const void* p);

}  // namespace octavo::simt
