// Several results of attention over disjoint keys become one.
#pragma once

#include "attention.cuh"

namespace octavo::cuda {

constexpr int kMergeThreads = 128;

// A block per row. outs [parts, rows, dim], lses [parts, rows] in base 2; minus infinity: an empty part.
template <typename T>
__global__ void __launch_bounds__(kMergeThreads)
    merge_states_kernel(T* out, float* lse, const T* outs, const float* lses, int parts, std::int64_t rows, int dim) {
    const std::int64_t row = blockIdx.x;
    float top = kMinusInfinity, total = 0.0F;
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
        top = fmaxf(top, lses[part * rows + row]);
    }
#pragma unroll 1
    for (int part = 0; part < parts; ++part) {
        total += weight_of(lses[part * rows + row], top);
    }
    for (int d = static_cast<int>(threadIdx.x); d < dim; d += kMergeThreads) {
        float value = 0.0F;
#pragma unroll 1
        for (int part = 0; part < parts; ++part) {
            const float weight = weight_of(lses[part * rows + row], top);
            const float x = to_float(outs[(part * rows + row) * dim + d]);
            value += weight == 0.0F ? 0.0F : weight * x;
        }
        from_float(total == 0.0F ? 0.0F : value / total, out[row * dim + d]);
    }
    if (lse && threadIdx.x == 0) {
        lse[row] = total == 0.0F ? kMinusInfinity : top + log2f(total);
    }
}

}  // namespace octavo::cuda
