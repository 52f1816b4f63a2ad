// Names of CUDA C++ that kernels use.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simt/runtime.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

inline dim3 threadIdx, blockIdx, blockDim, gridDim;  // of the fiber that runs

struct alignas(16) uint4 {
    std::uint32_t x, y, z, w;
};

inline void __syncthreads() { octavo::simt::block_barrier(); }
inline void __syncwarp() {
    using namespace octavo::simt;
    rendezvous(Lanes::kAnywhere, "__syncwarp", nullptr, [](void**) { ++self->warp->barriers; });
}
inline void __threadfence() {}

namespace octavo::cuda {

inline unsigned char* shared_memory() { return simt::self->block->shared; }

}  // namespace octavo::cuda

namespace octavo::simt {

template <typename T>
struct Shuffle {
    T value, result;
    int from;
};

inline void require_full(unsigned mask) {
    if (mask != 0xffffffffU) {
        die("only full masks");
    }
}

template <typename T>
T shuffle(const char* what, unsigned mask, T value, int from) {
    require_full(mask);
    Shuffle<T> mine{value, value, from};
    rendezvous(Lanes::kAnywhere, what, &mine, [](void** all) {
        for (int i = 0; i < kLanes; ++i) {
            auto* one = static_cast<Shuffle<T>*>(all[i]);
            one->result = static_cast<Shuffle<T>*>(all[one->from])->value;
        }
    });
    return mine.result;
}

}  // namespace octavo::simt

template <typename T>
T __shfl_sync(unsigned mask, T value, int lane) {
    return octavo::simt::shuffle("__shfl_sync", mask, value, lane & 31);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int bits) {
    return octavo::simt::shuffle("__shfl_xor_sync", mask, value, octavo::simt::self->lane ^ bits);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, int by) {
    const int lane = octavo::simt::self->lane;
    return octavo::simt::shuffle("__shfl_up_sync", mask, value, lane >= by ? lane - by : lane);
}
inline unsigned __ballot_sync(unsigned mask, bool vote) {
    octavo::simt::require_full(mask);
    unsigned mine[2] = {vote ? 1U : 0U, 0};
    octavo::simt::rendezvous(octavo::simt::Lanes::kAnywhere, "__ballot_sync", mine, [](void** all) {
        unsigned result = 0;
        for (int i = 0; i < octavo::simt::kLanes; ++i) {
            result |= static_cast<unsigned*>(all[i])[0] << i;
        }
        for (int i = 0; i < octavo::simt::kLanes; ++i) {
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
