#include "inst/decode_mma.h"

namespace octavo::cuda {
KernelChoice decode_mma_bf16_256(KvType kv, int groups) { return decode_choice_of<BFloat, 256>(kv, groups); }
}  // namespace octavo::cuda
