// Norms and the activation: one thread block per row, float32 inside. The rotation of a pair of dimensions.
#pragma once

#include "common/fault.cuh"
#include "common/numeric.cuh"
#include "common/reduce.cuh"

namespace octavo::cuda {

constexpr int kRowThreads = 256;

template <typename T>
struct NormParams {
    T* out;           // [rows, size]
    const T* x;       // [rows, size]
    T* residual;      // [rows, size] or null: becomes residual + x, and its norm is taken
    const T* weight;  // [size]
    std::int64_t out_row, x_row, residual_row;
    int size;
    float eps;
    bool whole;  // every row can be moved in pieces
};

template <typename T>
__global__ void __launch_bounds__(kRowThreads) rms_norm_kernel(const NormParams<T> p) {
    const std::int64_t row = blockIdx.x;
    const T* x = p.x + row * p.x_row;
    T* residual = p.residual ? p.residual + row * p.residual_row : nullptr;
    T* out = p.out + row * p.out_row;
    auto* space = reinterpret_cast<float*>(shared_memory());
    const int step = 8 * static_cast<int>(blockDim.x), begin = 8 * static_cast<int>(threadIdx.x);
    float sum = 0.0F;
    for (int i = begin; i + 8 <= p.size; i += step) {
        Eight<T> some = load_eight(x + i, p.whole);
        if (residual) {
            const Eight<T> other = load_eight(residual + i, p.whole);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                from_float(to_float(some.at[j]) + to_float(other.at[j]), some.at[j]);
            }
            store_eight(residual + i, some, p.whole);
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            sum += to_float(some.at[j]) * to_float(some.at[j]);
        }
    }
    for (int i = p.size / 8 * 8 + static_cast<int>(threadIdx.x); i < p.size; i += static_cast<int>(blockDim.x)) {
        T one = x[i];
        if (residual) {
            from_float(to_float(one) + to_float(residual[i]), one);
            residual[i] = one;
        }
        sum += to_float(one) * to_float(one);
    }
    sum = reduce_block(sum, space, Add{});
    const float factor = rsqrtf(sum / static_cast<float>(p.size) + p.eps);
    const T* from = residual ? residual : x;  // what this thread wrote above, and no other reads
    for (int i = begin; i + 8 <= p.size; i += step) {
        Eight<T> some = load_eight(from + i, p.whole);
        const Eight<T> weight = load_eight(p.weight + i, p.whole);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            from_float(to_float(some.at[j]) * factor * to_float(weight.at[j]), some.at[j]);
        }
        store_eight(out + i, some, p.whole);
    }
    for (int i = p.size / 8 * 8 + static_cast<int>(threadIdx.x); i < p.size; i += static_cast<int>(blockDim.x)) {
        from_float(to_float(from[i]) * factor * to_float(p.weight[i]), out[i]);
    }
}

__device__ __forceinline__ float silu(float x) { return x / (1.0F + expf(-x)); }

template <typename T>
struct SiluParams {
    T* out;      // [rows, size]
    const T* x;  // [rows, 2 size]
    std::int64_t out_row, x_row;
    int size;
    bool whole;
};

template <typename T>
__global__ void __launch_bounds__(kRowThreads) silu_and_mul_kernel(const SiluParams<T> p) {
    const T* gate = p.x + blockIdx.x * p.x_row;
    const T* up = gate + p.size;
    T* out = p.out + blockIdx.x * p.out_row;
    const int thread = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
    const int threads = static_cast<int>(gridDim.y * blockDim.x);
    for (int i = 8 * thread; i + 8 <= p.size; i += 8 * threads) {
        Eight<T> some = load_eight(gate + i, p.whole);
        const Eight<T> other = load_eight(up + i, p.whole);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            from_float(silu(to_float(some.at[j])) * to_float(other.at[j]), some.at[j]);
        }
        store_eight(out + i, some, p.whole);
    }
    for (int i = p.size / 8 * 8 + thread; i < p.size; i += threads) {
        from_float(silu(to_float(gate[i])) * to_float(up[i]), out[i]);
    }
}

// Dimension i of a pair turns with i + half; interleaved: 2 i with 2 i + 1.
template <typename T, typename C>
__device__ __forceinline__ void rotate_pair(T* head, int i, int half, bool interleaved, const C* cos, const C* sin) {
    T* first = head + (interleaved ? 2 * i : i);
    T* second = interleaved ? first + 1 : first + half;
    const float a = to_float(*first), b = to_float(*second), c = to_float(cos[i]), s = to_float(sin[i]);
    from_float(a * c - b * s, *first);
    from_float(b * c + a * s, *second);
}

}  // namespace octavo::cuda
