#include "kv_pages.h"

#include <cmath>

#include "octavo/check.h"

namespace octavo {
namespace {

constexpr std::int64_t kScaleBytes = 2;

bool eight_bits(DType dtype) { return dtype == DType::kE4M3 || dtype == DType::kE5M2 || dtype == DType::kI8; }

// The 8-bit type of that name.
DType eight_bits_named(const std::string& type, const char* name) {
    if (type == "fp8" || type == "fp8_e4m3") {
        return DType::kE4M3;
    }
    if (type == "fp8_e5m2") {
        return DType::kE5M2;
    }
    require(type == "int8", name, "is none of fp8, fp8_e4m3, fp8_e5m2, int8");
    return DType::kI8;
}

DType elements(const TensorRef& data, const std::string& type, const KvNames& names) {
    const bool bytes = size_of(data.dtype) == 1;
    const DType dtype = type == "auto" ? data.dtype : eight_bits_named(type, names.type);
    require(type == "auto" || bytes, names.keys, "does not hold 8-bit numbers");
    require(data.dtype == dtype || data.dtype == DType::kU8, names.keys,
            "is of another 8-bit type than it is said to be");
    require(data.is_float() || eight_bits(dtype), names.keys, "holds neither floats nor 8-bit numbers of a known kind");
    return dtype;
}

KvSide rows_at(const TensorRef& x, char* data, int block, int head, int slot, std::int64_t dim) {
    return {data, x.stride[block], x.stride[head], x.stride[slot], dim, 0, nullptr, 0, nullptr, 0, 0};
}

void put_scale(KvSide& side, const TensorRef& scale, const char* name, std::int64_t heads) {
    if (!scale.given()) {
        return;
    }
    expect(scale, name, {kAny}, DType::kF32);
    require(scale.shape[0] == 1 || scale.shape[0] == heads, name, "has neither one number nor one for each head");
    for (std::int64_t i = 0; i < scale.shape[0]; ++i) {
        const float one = scale.as<float>()[i];
        require(one > 0 && std::isfinite(one), name, "has a number that is not positive and finite");
    }
    side.scales = scale.as<float>();
    side.per_head = scale.shape[0] == heads ? 1 : 0;
}

// Keys and values in one tensor [n, g, 2, b, d], or [n, g, 2, b, d + 2] with a scale for each slot.
KvPages joint(const TensorRef& kv, DType dtype, std::int64_t dim, const char* name) {
    const bool paged = dtype == DType::kI8 && kv.ndim == 5 && kv.shape[4] == dim + kScaleBytes;
    expect(kv, name, {kAny, kAny, 2, kAny, paged ? dim + kScaleBytes : dim});
    const std::int64_t size = size_of(dtype), block_size = kv.shape[3];
    KvPages pages{};
    pages.keys = rows_at(kv, kv.as<char>(), 0, 1, 3, dim);
    pages.values = rows_at(kv, kv.as<char>() + kv.stride[2] * size, 0, 1, 3, dim);
    if (paged) {
        require(block_size == 1 || kv.stride[3] == kv.shape[4], name, "has pages that are not contiguous");
        for (KvSide* side : {&pages.keys, &pages.values}) {
            side->slot = dim;
            side->slot_scales = side->data + block_size * dim;
            side->slot_scale_block = side->block;
            side->slot_scale_head = side->head;
        }
    }
    pages.num_blocks = kv.shape[0];
    pages.num_heads = kv.shape[1];
    pages.block_size = block_size;
    return pages;
}

KvPages two(const TensorRef& keys, const TensorRef& values, std::int64_t dim, const KvNames& names) {
    expect(keys, names.keys, {kAny, kAny, kAny, dim});
    expect(values, names.values, {keys.shape[0], keys.shape[1], keys.shape[2], dim});
    KvPages pages{};
    pages.keys = rows_at(keys, keys.as<char>(), 0, 1, 2, dim);
    pages.values = rows_at(values, values.as<char>(), 0, 1, 2, dim);
    pages.num_blocks = keys.shape[0];
    pages.num_heads = keys.shape[1];
    pages.block_size = keys.shape[2];
    return pages;
}

KvPages packed(const TensorRef& keys, const TensorRef& values, std::int64_t dim, const KvNames& names) {
    const std::int64_t x = keys.shape[4];
    require(x > 0 && dim % x == 0, names.keys, "does not divide a head's dimensions evenly");
    expect(keys, names.keys, {kAny, kAny, dim / x, kAny, x});
    expect(values, names.values, {keys.shape[0], keys.shape[1], dim, keys.shape[3]});
    require(keys.stride[3] == x, names.keys, "has gaps between slots");
    KvPages pages{};
    pages.keys = rows_at(keys, keys.as<char>(), 0, 1, 3, x);
    pages.keys.outer = keys.stride[2];
    pages.values = rows_at(values, values.as<char>(), 0, 1, 3, 1);
    pages.values.outer = values.stride[2];
    pages.num_blocks = keys.shape[0];
    pages.num_heads = keys.shape[1];
    pages.block_size = keys.shape[3];
    return pages;
}

}  // namespace

KvPages kv_pages(const KvCache& kv, std::int64_t head_dim, const KvNames& names) {
    const bool both = !kv.values.given();
    usable(kv.keys, names.keys);
    const DType dtype = elements(kv.keys, kv.type, names);
    KvPages pages{};
    if (both) {
        pages = joint(kv.keys, dtype, head_dim, names.keys);
    } else {
        usable(kv.values, names.values);
        require(kv.values.dtype == kv.keys.dtype, names.values, "is of another type than the keys");
        pages =
            kv.keys.ndim == 5 ? packed(kv.keys, kv.values, head_dim, names) : two(kv.keys, kv.values, head_dim, names);
    }
    require(pages.num_heads > 0 && pages.block_size > 0, names.keys, "has no slots");
    pages.dtype = dtype;
    pages.head_dim = head_dim;
    require(!pages.keys.slot_scales || !(kv.key_scale.given() || kv.value_scale.given()), names.key_scale,
            "is given, and so are scales of slots");
    put_scale(pages.keys, kv.key_scale, names.key_scale, pages.num_heads);
    put_scale(pages.values, kv.value_scale, names.value_scale, pages.num_heads);
    return pages;
}

KvPages kv_pages(const KvCache& kv, const KvNames& names) {
    const bool both = !kv.values.given(), packed = !both && kv.keys.ndim == 5;
    usable(kv.keys, names.keys);
    require(kv.keys.ndim == (both || packed ? 5 : 4), names.keys, "has another number of dimensions than a cache");
    if (packed) {
        return kv_pages(kv, volume({kv.keys.shape[2], kv.keys.shape[4]}), names);
    }
    const std::int64_t width = kv.keys.shape[kv.keys.ndim - 1];
    // Heads have a number of dimensions that is a multiple of 8: two more are a page's scales.
    const bool scaled = both && size_of(kv.keys.dtype) == 1 && width % 8 == kScaleBytes;
    return kv_pages(kv, scaled ? width - kScaleBytes : width, names);
}

void expect_apart(const KvCache& kv, const char* name, std::initializer_list<const TensorRef*> others) {
    expect_apart(kv.keys, name, others);
    expect_apart(kv.keys, name, {&kv.values, &kv.key_scale, &kv.value_scale});
    if (kv.values.given()) {
        expect_apart(kv.values, name, others);
        expect_apart(kv.values, name, {&kv.key_scale, &kv.value_scale});
    }
}

void check::kv_cache(const KvCache& kv) { kv_pages(kv, KvNames{"keys", "values", "key_scale", "value_scale", "type"}); }

void check_slots(const TensorRef& slots, const char* name, std::int64_t num_tokens, const KvPages& pages) {
    expect(slots, name, {num_tokens}, DType::kI64);
    const std::int64_t num_slots = volume({pages.num_blocks, pages.block_size});
    for (std::int64_t token = 0; token < num_tokens; ++token) {
        const std::int64_t slot = slots.as<std::int64_t>()[token];
        require(slot >= -1 && slot < num_slots, name, "names a slot that is not there");
    }
}

}  // namespace octavo
