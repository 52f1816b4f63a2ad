#include "inst/prefill_mma.h"

namespace octavo::cuda {
KernelChoice prefill_mma_bf16_128(KvType kv) { return prefill_choice_of<BFloat, 128>(kv); }
}  // namespace octavo::cuda
