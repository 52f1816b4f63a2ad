#include "inst/decode_mma.h"

namespace octavo::cuda {
KernelChoice decode_mma_f16_64(KvType kv, int groups) { return decode_choice_of<Half, 64>(kv, groups); }
}  // namespace octavo::cuda
