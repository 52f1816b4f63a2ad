#include "inst/decode_mma.h"

namespace octavo::cuda {
KernelChoice decode_mma_bf16_128(KvType kv, int groups) { return decode_choice_of<BFloat, 128>(kv, groups); }
}  // namespace octavo::cuda
