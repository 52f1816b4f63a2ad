#include "inst/linear_mma.h"

namespace octavo::cuda {
template void launch_linear(LinearParams<PackedWeight<BFloat, PackedFormat::kQ4>>, Stream);
template void launch_linear(LinearParams<PackedWeight<BFloat, PackedFormat::kQ4Mins>>, Stream);
template void launch_linear(LinearParams<PackedWeight<BFloat, PackedFormat::kE4M3>>, Stream);
}  // namespace octavo::cuda
