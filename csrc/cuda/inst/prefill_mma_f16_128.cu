#include "inst/prefill_mma.h"

namespace octavo::cuda {
KernelChoice prefill_mma_f16_128(KvType kv) { return prefill_choice_of<Half, 128>(kv); }
}  // namespace octavo::cuda
