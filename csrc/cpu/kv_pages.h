// From what callers pass as a cache to what kernels read.
#pragma once

#include "kernels.h"
#include "octavo/api.h"

namespace octavo {

// The 8-bit type of that name ("fp8", "fp8_e4m3", "fp8_e5m2", "int8").
DType eight_bits_named(const std::string& type, const char* name);

// Where keys and values of `head_dim` dimensions lie; checked.
KvPages kv_pages(const KvCache& kv, std::int64_t head_dim);

// The same where nothing else says how many dimensions there are.
KvPages kv_pages(const KvCache& kv);

// That slots i64 [t] are -1 or places of the pages.
void check_slots(const TensorRef& slots, const char* name, std::int64_t num_tokens, const KvPages& pages);

}  // namespace octavo
