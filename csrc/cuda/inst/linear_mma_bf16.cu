#include "inst/linear_mma.h"

namespace octavo::cuda {
template void launch_linear(LinearParams<PlainWeight<BFloat>>, Stream);
}  // namespace octavo::cuda
