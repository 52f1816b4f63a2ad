// Runs CUDA kernels on a CPU, so that their sources are tested, under AddressSanitizer, where there is no GPU.
//
// A thread is a fiber. Whatever needs several threads is a rendezvous: a lane waits there until all lanes of its warp
// (or threads of its block) have come to the same one, and then it happens for all. Unkind on purpose: warps and blocks
// run in random order, two blocks at a time; shared memory starts as NaN; an asynchronous copy arrives at once or only
// when it is waited for, by chance; full masks only, and every thread must take part in every barrier.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
    std::uint32_t x, y, z, w;
};

namespace octavo::shim {

constexpr int kLanes = 32;
constexpr std::size_t kStack = 128 * 1024;

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
    std::vector<std::vector<Copy>> groups;  // closed groups of copies on their way
    std::vector<Copy> open;
};

struct Block {
    dim3 index, grid, size;
    unsigned char* shared = nullptr;
    std::size_t shared_bytes = 0;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    const std::function<void()>* body = nullptr;
    int arrived = 0, alive = 0, votes = 0;
};

// One operating-system thread runs kernels at a time.
inline Fiber* self = nullptr;
inline void* scheduler_stack_pointer = nullptr;
inline const void* scheduler_bottom = nullptr;
inline std::size_t scheduler_size = 0;
inline std::mt19937 chance(1);

[[noreturn]] inline void die(const std::string& what) {
    std::fprintf(stderr, "simt shim: %s", what.c_str());
    if (self) {
        std::fprintf(stderr, " (block %u,%u,%u thread %u)", self->block->index.x, self->block->index.y,
                     self->block->index.z, self->thread.x);
    }
    std::fprintf(stderr, "\n");
    std::abort();
}

// Pushes what a call must preserve, changes stacks, and returns on the other one.
extern "C" void octavo_shim_switch(void** save, void* to);
#ifdef OCTAVO_SIMT_SHIM_MAIN
asm(R"(
.text
.globl octavo_shim_switch
.type octavo_shim_switch, @function
octavo_shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size octavo_shim_switch, .-octavo_shim_switch
)");
#endif

inline void to_scheduler([[maybe_unused]] bool last) {
    Fiber* me = self;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(last ? nullptr : &fake, scheduler_bottom, scheduler_size);
#endif
    octavo_shim_switch(&me->stack_pointer, scheduler_stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, &scheduler_bottom, &scheduler_size);
#endif
}

inline void to_fiber(Fiber& fiber) {
    self = &fiber;
#if defined(__SANITIZE_ADDRESS__)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, fiber.stack, kStack);
#endif
    octavo_shim_switch(&scheduler_stack_pointer, fiber.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
    self = nullptr;
}

inline void arrive(const Copy& copy) {
    if (copy.valid) {
        std::memcpy(copy.to, copy.from, 16);
    } else {
        std::memset(copy.to, 0, 16);
    }
}

inline void entry() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_bottom, &scheduler_size);
#endif
    (*self->block->body)();
    for (const std::vector<Copy>& group : self->groups) {
        if (!group.empty()) {
            die("a thread ends while its copies are on their way");
        }
    }
    if (!self->open.empty()) {
        die("a thread ends with copies it never committed");
    }
    self->state = Fiber::kDone;
    --self->block->alive;
    to_scheduler(true);
}

template <typename Execute>
void rendezvous(const char* what, void* operands, Execute execute) {
    Warp& warp = *self->warp;
    if (warp.arrived == 0) {
        warp.what = what;
    } else if (std::strcmp(warp.what, what) != 0) {
        die(std::string("lanes diverged: ") + warp.what + " and " + what);
    }
    warp.operands[self->lane] = operands;
    if (++warp.arrived < kLanes) {
        self->state = Fiber::kWaiting;
        to_scheduler(false);
        return;
    }
    warp.arrived = 0;
    execute(warp.operands);
    for (int i = 0; i < kLanes; ++i) {
        (self - self->lane + i)->state = Fiber::kReady;
    }
}

inline void block_barrier() {
    Block& block = *self->block;
    for (const Warp& warp : block.warps) {
        if (&warp == self->warp && warp.arrived != 0) {
            die(std::string("lanes diverged: ") + warp.what + " and __syncthreads");
        }
    }
    if (++block.arrived < static_cast<int>(block.fibers.size())) {
        self->state = Fiber::kWaiting;
        to_scheduler(false);
        return;
    }
    block.arrived = 0;
    for (Fiber& fiber : block.fibers) {
        fiber.state = Fiber::kReady;
    }
}

// Memory that blocks run in, kept from launch to launch.
inline std::vector<unsigned char*>& stacks() {
    static std::vector<unsigned char*> pool;
    return pool;
}

inline std::unique_ptr<Block> make_block(dim3 index, dim3 grid, int threads, std::size_t shared_bytes,
                                         const std::function<void()>* body) {
    auto block = std::make_unique<Block>();
    block->index = index;
    block->grid = grid;
    block->size = dim3(static_cast<unsigned>(threads));
    block->body = body;
    block->alive = threads;
    block->fibers.resize(static_cast<std::size_t>(threads));
    block->warps.resize(static_cast<std::size_t>(threads / kLanes));
    block->shared_bytes = shared_bytes;
    block->shared = static_cast<unsigned char*>(std::aligned_alloc(128, (shared_bytes + 127) / 128 * 128 + 128));
    std::memset(block->shared, 0xff, shared_bytes);
#if defined(__SANITIZE_ADDRESS__)
    __asan_poison_memory_region(block->shared + shared_bytes, (shared_bytes + 127) / 128 * 128 + 128 - shared_bytes);
#endif
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = block->fibers[static_cast<std::size_t>(i)];
        if (stacks().empty()) {
            stacks().push_back(static_cast<unsigned char*>(std::malloc(kStack)));
        }
        fiber.stack = stacks().back();
        stacks().pop_back();
#if defined(__SANITIZE_ADDRESS__)
        __asan_unpoison_memory_region(fiber.stack, kStack);
#endif
        fiber.block = block.get();
        fiber.thread = dim3(static_cast<unsigned>(i), 0, 0);
        fiber.lane = i % kLanes;
        fiber.warp = &block->warps[static_cast<std::size_t>(i / kLanes)];
        auto* top = reinterpret_cast<void**>(fiber.stack + kStack - 64);  // entry finds an unaligned call frame
        *--top = nullptr;
        *--top = reinterpret_cast<void*>(&entry);
        for (int reg = 0; reg < 6; ++reg) {
            *--top = nullptr;
        }
        fiber.stack_pointer = top;
    }
    return block;
}

inline void end_block(Block& block) {
    for (Fiber& fiber : block.fibers) {
        stacks().push_back(fiber.stack);
    }
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(block.shared, (block.shared_bytes + 127) / 128 * 128 + 128);
#endif
    std::free(block.shared);
}

// Runs the ready lanes of a warp up to their next rendezvous, beginning anywhere.
inline bool run_warp(Block& block, std::size_t warp) {
    bool ran = false;
    const std::size_t start = chance() % kLanes;
    for (std::size_t i = 0; i < kLanes; ++i) {
        Fiber& fiber = block.fibers[warp * kLanes + (start + i) % kLanes];
        if (fiber.state == Fiber::kReady) {
            to_fiber(fiber);
            ran = true;
        }
    }
    return ran;
}

inline void run_step(std::vector<std::unique_ptr<Block>>& resident) {
    std::vector<std::pair<Block*, std::size_t>> all;
    for (auto& block : resident) {
        for (std::size_t warp = 0; warp < block->warps.size(); ++warp) {
            all.emplace_back(block.get(), warp);
        }
    }
    std::shuffle(all.begin(), all.end(), chance);
    bool ran = false;
    for (auto& [block, warp] : all) {
        ran = chance() % 4 != 0 && run_warp(*block, warp) ? true : ran;
    }
    if (!ran) {
        for (auto& [block, warp] : all) {
            ran = run_warp(*block, warp) || ran;
        }
    }
    if (!ran) {
        die("deadlock: threads wait at different barriers, or some have ended");
    }
}

inline void run_grid(dim3 grid, int threads, std::size_t shared_bytes, const std::function<void()>& body) {
    if (threads % kLanes != 0 || threads <= 0 || threads > 1024 || shared_bytes > 227 * 1024 || grid.y > 65535 ||
        grid.z > 65535) {
        die("no device runs such a launch");
    }
    std::vector<dim3> waiting;
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; ++x) {
                waiting.emplace_back(x, y, z);
            }
        }
    }
    std::shuffle(waiting.begin(), waiting.end(), chance);
    std::vector<std::unique_ptr<Block>> resident;
    while (!waiting.empty() || !resident.empty()) {
        while (resident.size() < 2 && !waiting.empty()) {
            resident.push_back(make_block(waiting.back(), grid, threads, shared_bytes, &body));
            waiting.pop_back();
        }
        run_step(resident);
        for (std::size_t i = resident.size(); i-- > 0;) {
            if (resident[i]->alive == 0) {
                end_block(*resident[i]);
                resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(i));
            }
        }
    }
}

}  // namespace octavo::shim

// ---- names of the language -----------------------------------------------------------------------------------------

#define threadIdx (::octavo::shim::self->thread)
#define blockIdx (::octavo::shim::self->block->index)
#define blockDim (::octavo::shim::self->block->size)
#define gridDim (::octavo::shim::self->block->grid)

inline void __syncthreads() { octavo::shim::block_barrier(); }
inline void __syncwarp() {
    octavo::shim::rendezvous("__syncwarp", nullptr, [](void**) {});
}
inline void __threadfence() {}

namespace octavo::shim {

template <typename T>
struct Shuffle {
    T value, result;
    int from;
};

template <typename T>
T shuffle(const char* what, unsigned mask, T value, int from) {
    if (mask != 0xffffffffU) {
        die("only full masks");
    }
    Shuffle<T> mine{value, value, from};
    rendezvous(what, &mine, [](void** all) {
        for (int i = 0; i < kLanes; ++i) {
            auto* one = static_cast<Shuffle<T>*>(all[i]);
            one->result = static_cast<Shuffle<T>*>(all[one->from])->value;
        }
    });
    return mine.result;
}

}  // namespace octavo::shim

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
    return octavo::shim::shuffle("__shfl_sync", mask, value, lane & 31);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return octavo::shim::shuffle("__shfl_xor_sync", mask, value, octavo::shim::self->lane ^ bits);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int by) {
    const int lane = octavo::shim::self->lane;
    return octavo::shim::shuffle("__shfl_up_sync", mask, value, lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
    if (mask != 0xffffffffU) {
        octavo::shim::die("only full masks");
    }
    unsigned mine[2] = {vote ? 1U : 0U, 0};
    octavo::shim::rendezvous("__ballot_sync", mine, [](void** all) {
        unsigned result = 0;
        for (int i = 0; i < 32; ++i) {
            result |= static_cast<unsigned*>(all[i])[0] << i;
        }
        for (int i = 0; i < 32; ++i) {
            static_cast<unsigned*>(all[i])[1] = result;
        }
    });
    return mine[1];
}
using std::max;
using std::min;
inline float rsqrtf(float x) { return 1.0F / std::sqrt(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

template <typename T>
T atomicAdd(T* p, T x) {
    const T old = *p;
    *p = old + x;
    return old;
}

// ---- the names of arch/ptx.cuh and arch/launch.cuh -----------------------------------------------------------------

namespace octavo::cuda {

struct Half {
    std::uint16_t bits;
};
struct BFloat {
    std::uint16_t bits;
};

inline std::uint32_t bits_of(float x) {
    std::uint32_t y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline float float_of(std::uint32_t x) {
    float y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

inline float to_float(Half x) {
    const std::uint32_t sign = (x.bits & 0x8000U) << 16, rest = x.bits & 0x7fffU;
    if (rest >= 0x7c00U) {
        return float_of(sign | 0x7f800000U | (rest & 0x3ffU) << 13);
    }
    // As if the exponent had 8 bits, then corrected by 2^112: right for numbers below the normal range, too.
    return float_of(sign | bits_of(float_of(rest << 13) * float_of(0x77800000U)));
}
inline float to_float(BFloat x) { return float_of(static_cast<std::uint32_t>(x.bits) << 16); }

inline void from_float(float x, Half& y) {
    const double size = std::fabs(static_cast<double>(x));
    const std::uint32_t sign = bits_of(x) >> 16 & 0x8000U;
    std::uint32_t half;
    if (std::isnan(x)) {
        half = 0x7fffU;
    } else if (size >= 65520.0) {
        half = 0x7c00U;
    } else {
        const int exponent = size < 6.103515625e-05 ? -14 : std::ilogb(size);
        const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
        half = static_cast<std::uint32_t>(exponent + 14) * 1024U + units;
    }
    y.bits = static_cast<std::uint16_t>(sign | half);
}
inline void from_float(float x, BFloat& y) {
    const std::uint32_t b = bits_of(x);
    y.bits = static_cast<std::uint16_t>(std::isnan(x) ? 0x7fffU : (b + 0x7fffU + (b >> 16 & 1U)) >> 16);
}

template <typename T>
std::uint32_t pack(float low, float high) {
    T a, b;
    from_float(low, a);
    from_float(high, b);
    return static_cast<std::uint32_t>(b.bits) << 16 | a.bits;
}
template <typename T>
float low_of(std::uint32_t x) {
    return to_float(T{static_cast<std::uint16_t>(x & 0xffffU)});
}
template <typename T>
float high_of(std::uint32_t x) {
    return to_float(T{static_cast<std::uint16_t>(x >> 16)});
}
template <typename T>
std::uint32_t mul2(std::uint32_t a, std::uint32_t b) {
    return pack<T>(low_of<T>(a) * low_of<T>(b), high_of<T>(a) * high_of<T>(b));
}
template <typename T>
std::uint32_t sub2(std::uint32_t a, std::uint32_t b) {
    return pack<T>(low_of<T>(a) - low_of<T>(b), high_of<T>(a) - high_of<T>(b));
}

inline std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
    const std::uint64_t both = static_cast<std::uint64_t>(b) << 32 | a;
    std::uint32_t y = 0;
    for (int i = 0; i < 4; ++i) {
        y |= static_cast<std::uint32_t>(both >> 8 * (selector >> 4 * i & 7U) & 0xffU) << 8 * i;
    }
    return y;
}

inline float fast_exp2(float x) { return std::exp2(x); }

inline void copy_async16(void* to, const void* from, bool valid) {
    if (reinterpret_cast<std::uintptr_t>(to) % 16 || (valid && reinterpret_cast<std::uintptr_t>(from) % 16)) {
        shim::die("a copy of 16 bytes that is not aligned");
    }
    const shim::Copy copy{to, from, valid};
    if (shim::chance() % 2) {
        shim::arrive(copy);
    } else {
        shim::self->open.push_back(copy);
    }
}
inline void commit_copies() {
    shim::self->groups.push_back(std::move(shim::self->open));
    shim::self->open.clear();
}
template <int kPending>
void wait_copies() {
    auto& groups = shim::self->groups;
    while (groups.size() > kPending) {
        for (const shim::Copy& copy : groups.front()) {
            shim::arrive(copy);
        }
        groups.erase(groups.begin());
    }
}

struct MatrixLoad {
    const void* row;
    std::uint32_t result[4];
};

template <bool kTransposed>
void gather_matrices(void** all) {
    for (int lane = 0; lane < 32; ++lane) {
        for (int m = 0; m < 4; ++m) {
            std::uint16_t pair[2];
            for (int i = 0; i < 2; ++i) {
                const int row = kTransposed ? 2 * (lane % 4) + i : lane / 4;
                const int column = kTransposed ? lane / 4 : 2 * (lane % 4) + i;
                const void* from = static_cast<MatrixLoad*>(all[8 * m + row])->row;
                std::memcpy(&pair[i], static_cast<const std::uint16_t*>(from) + column, 2);
            }
            static_cast<MatrixLoad*>(all[lane])->result[m] = static_cast<std::uint32_t>(pair[1]) << 16 | pair[0];
        }
    }
}

inline MatrixLoad matrix_row(const void* row) {
    if (reinterpret_cast<std::uintptr_t>(row) % 16) {
        shim::die("a matrix row that is not aligned");
    }
    return {row, {}};
}
inline void load_matrices(std::uint32_t (&r)[4], const void* row) {
    MatrixLoad load = matrix_row(row);
    shim::rendezvous("ldmatrix", &load, gather_matrices<false>);
    std::memcpy(r, load.result, sizeof r);
}
inline void load_matrices_transposed(std::uint32_t (&r)[4], const void* row) {
    MatrixLoad load = matrix_row(row);
    shim::rendezvous("ldmatrix.trans", &load, gather_matrices<true>);
    std::memcpy(r, load.result, sizeof r);
}
inline std::uint32_t transpose_matrix(std::uint32_t x) {
    std::uint32_t both[2] = {x, 0};
    shim::rendezvous("movmatrix", both, [](void** all) {
        for (int lane = 0; lane < 32; ++lane) {
            std::uint32_t result = 0;
            for (int i = 0; i < 2; ++i) {
                const int row = 2 * (lane % 4) + i, column = lane / 4;
                const std::uint32_t pair = static_cast<std::uint32_t*>(all[4 * row + column / 2])[0];
                result |= (pair >> 16 * (column % 2) & 0xffffU) << 16 * i;
            }
            static_cast<std::uint32_t*>(all[lane])[1] = result;
        }
    });
    return both[1];
}

struct MatrixProduct {
    float* c;
    const std::uint32_t* a;
    std::uint32_t b[2];
};

template <typename T>
void multiply_matrices(void** all) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; ++lane) {
        const auto* one = static_cast<MatrixProduct*>(all[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            a[g + 8 * (i % 2)][2 * t + 8 * (i / 2)] = low_of<T>(one->a[i]);
            a[g + 8 * (i % 2)][2 * t + 8 * (i / 2) + 1] = high_of<T>(one->a[i]);
        }
        for (int i = 0; i < 2; ++i) {
            b[2 * t + 8 * i][g] = low_of<T>(one->b[i]);
            b[2 * t + 8 * i + 1][g] = high_of<T>(one->b[i]);
        }
    }
    for (int lane = 0; lane < 32; ++lane) {
        float* c = static_cast<MatrixProduct*>(all[lane])->c;
        for (int i = 0; i < 4; ++i) {
            const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
            for (int k = 0; k < 16; ++k) {
                c[i] += a[row][k] * b[k][column];
            }
        }
    }
}

template <typename T>
void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    MatrixProduct mine{c, a, {b0, b1}};
    shim::rendezvous("mma", &mine, multiply_matrices<T>);
}

inline std::int32_t add_acquire_release(std::int32_t* p, std::int32_t x) { return atomicAdd(p, x); }
inline float load_shared_result(const float* p) { return *p; }

using Stream = void*;

class DeviceError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

inline unsigned char* shared_memory() { return shim::self->block->shared; }

template <typename T>
struct Given {
    using Type = T;
};

template <typename... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared_bytes, Stream,
            typename Given<Parameters>::Type... parameters) {
    shim::run_grid(grid, threads, shared_bytes, [&] { kernel(parameters...); });
}

template <typename... Parameters>
int resident_blocks(void (*)(Parameters...), int, std::size_t) {
    return 6;  // few, so that a small case already has blocks with several items
}

}  // namespace octavo::cuda
