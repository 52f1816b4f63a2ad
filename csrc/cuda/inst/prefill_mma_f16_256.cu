#include "inst/prefill_mma.h"

namespace octavo::cuda {
KernelChoice prefill_mma_f16_256(KvType kv) { return prefill_choice_of<Half, 256>(kv); }
}  // namespace octavo::cuda
