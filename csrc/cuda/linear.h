// What linear.cu chooses among; inst/ has the kernels of tensor cores, one file per type.
#pragma once

#include "api.h"
#include "arch/simt.h"
#include "linear.cuh"
#include "linear_fp8.cuh"

namespace octavo::cuda {

constexpr std::int64_t kFewTokens = 16, kSomeTokens = 64;

// Queues the product in tiles of 32 rows x 16 or 64 tokens, or of 128 x 128 where those keep the device busy.
template <typename Weight>
void launch_linear(LinearParams<Weight> p, Stream stream);

}  // namespace octavo::cuda
