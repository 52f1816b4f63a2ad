// Sums and maxima over a warp and over a thread block, in fixed order.
#pragma once

#include "arch/simt.h"

namespace octavo::cuda {

constexpr unsigned kAllLanes = 0xffffffffU;

template <typename T, typename Combine>
__device__ __forceinline__ T reduce_warp(T x, Combine combine) {
#pragma unroll
    for (int bits = 16; bits > 0; bits /= 2) {
        x = combine(x, __shfl_xor_sync(kAllLanes, x, bits));
    }
    return x;
}

// All threads get the result. `space`: shared memory for one T per warp; free again when this returns.
template <typename T, typename Combine>
__device__ __forceinline__ T reduce_block(T x, T* space, Combine combine) {
    const int warp = static_cast<int>(threadIdx.x) / 32, warps = static_cast<int>(blockDim.x) / 32;
    x = reduce_warp(x, combine);
    if (threadIdx.x % 32 == 0) {
        space[warp] = x;
    }
    __syncthreads();
    T result = space[0];
    for (int i = 1; i < warps; ++i) {
        result = combine(result, space[i]);
    }
    __syncthreads();
    return result;
}

struct Add {
    template <typename T>
    __device__ T operator()(T a, T b) const {
        return a + b;
    }
};
struct Larger {
    template <typename T>
    __device__ T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};

}  // namespace octavo::cuda
