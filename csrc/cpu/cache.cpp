// Writes keys and values into the pages of a cache.
#include "kv_pages.h"
#include "octavo/check.h"
#include "octavo/pool.h"

namespace octavo {
namespace {

const char* row_at(const TensorRef& x, std::int64_t token, std::int64_t head) {
    return x.as<char>() + (token * x.stride[0] + head * x.stride[1]) * size_of(x.dtype);
}

KvPages check_tokens(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots) {
    expect(keys, "keys", {kAny, kAny, kAny});
    const KvPages pages = kv_pages(kv, keys.shape[2]);
    require(keys.is_float(), "keys", "must be floats");
    expect(keys, "keys", {kAny, pages.num_heads, pages.head_dim});
    expect(values, "values", {keys.shape[0], pages.num_heads, pages.head_dim}, keys.dtype);
    check_slots(slots, "slots", keys.shape[0], pages);
    expect_apart(kv, "kv", {&keys, &values, &slots});
    return pages;
}

}  // namespace

void check::cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots) {
    check_tokens(kv, keys, values, slots);
}

void cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots) {
    const KvPages pages = check_tokens(kv, keys, values, slots);
    if (keys.size() == 0) {
        return;
    }
    const std::int64_t dim = pages.head_dim, size = pages.block_size;
    Pool::instance().run([&](PoolThread& thread) {
        thread.each(keys.shape[0], [&](std::int64_t token) {
            const std::int64_t slot = slots.as<std::int64_t>()[token];
            float* wide = thread.scratch(dim);
            for (std::int64_t head = 0; slot >= 0 && head < pages.num_heads; ++head) {
                kernels().to_float(keys.dtype, row_at(keys, token, head), dim, wide);
                kernels().write_slot(pages, pages.keys, slot / size, head, slot % size, wide);
                kernels().to_float(values.dtype, row_at(values, token, head), dim, wide);
                kernels().write_slot(pages, pages.values, slot / size, head, slot % size, wide);
            }
        });
    });
}

}  // namespace octavo
