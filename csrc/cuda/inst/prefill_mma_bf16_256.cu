#include "inst/prefill_mma.h"

namespace octavo::cuda {
KernelChoice prefill_mma_bf16_256(KvType kv) { return prefill_choice_of<BFloat, 256>(kv); }
}  // namespace octavo::cuda
