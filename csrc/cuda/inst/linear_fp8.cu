#include "linear_fp8.cuh"

#include "inst/linear_mma.h"

namespace octavo::cuda {
template void launch_linear(LinearParams<Fp8Weight<Half>>, Stream);
template void launch_linear(LinearParams<Fp8Weight<BFloat>>, Stream);
}  // namespace octavo::cuda
