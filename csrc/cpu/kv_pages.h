// Makes the description of a cache that kernels read (KvPages) from the cache that a caller passes (KvCache).
#pragma once

#include "kernels.h"
#include "octavo/api.h"

namespace octavo {

// What errors call the parts of a cache.
struct KvNames {
    const char *keys, *values, *key_scale, *value_scale, *type;

    explicit constexpr KvNames(const char* all) : KvNames(all, all, all, all, all) {}
    constexpr KvNames(const char* k, const char* v, const char* ks, const char* vs, const char* t)
        : keys(k), values(v), key_scale(ks), value_scale(vs), type(t) {}
};

// Checks the cache and says where its keys and values of `head_dim` dimensions lie.
KvPages kv_pages(const KvCache& kv, std::int64_t head_dim, const KvNames& names = KvNames("kv"));

// The same, with the number of dimensions taken from the cache's own shape.
KvPages kv_pages(const KvCache& kv, const KvNames& names);

// For a cache that is written: expect_apart for each of its tensors.
void expect_apart(const KvCache& kv, const char* name, std::initializer_list<const TensorRef*> others);

// Throws unless slots i64 [t] are -1 or slots of the pages.
void check_slots(const TensorRef& slots, const char* name, std::int64_t num_tokens, const KvPages& pages);

}  // namespace octavo
