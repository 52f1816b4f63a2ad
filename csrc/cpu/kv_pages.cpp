#include "kv_pages.h"

namespace octavo {
namespace {

constexpr std::int64_t kScaleBytes = 2;

bool eight_bits(DType dtype) { return dtype == DType::kE4M3 || dtype == DType::kE5M2 || dtype == DType::kI8; }

DType elements(const TensorRef& data, const std::string& type, const char* name) {
    const bool bytes = size_of(data.dtype) == 1;
    const DType dtype = type == "auto" ? data.dtype : eight_bits_named(type, "kv_cache_dtype");
    require(type == "auto" || bytes, name, "does not hold 8-bit numbers");
    require(data.is_float() || eight_bits(dtype), name, "holds neither floats nor 8-bit numbers of a known kind");
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
    side.scales = scale.as<float>();
    side.per_head = scale.shape[0] == heads ? 1 : 0;
}

// Keys and values in one tensor [n, g, 2, b, d], or [n, g, 2, b, d + 2] with a scale for each slot.
KvPages joint(const TensorRef& kv, DType dtype, std::int64_t dim) {
    const bool paged = dtype == DType::kI8 && kv.ndim == 5 && kv.shape[4] == dim + kScaleBytes;
    expect(kv, "kv", {kAny, kAny, 2, kAny, paged ? dim + kScaleBytes : dim});
    const std::int64_t size = size_of(dtype), block_size = kv.shape[3];
    KvPages pages{};
    pages.keys = rows_at(kv, kv.as<char>(), 0, 1, 3, dim);
    pages.values = rows_at(kv, kv.as<char>() + kv.stride[2] * size, 0, 1, 3, dim);
    if (paged) {
        require(block_size == 1 || kv.stride[3] == kv.shape[4], "kv", "has pages that are not contiguous");
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

KvPages apart(const TensorRef& keys, const TensorRef& values, std::int64_t dim) {
    expect(keys, "key_cache", {kAny, kAny, kAny, dim});
    expect(values, "value_cache", {keys.shape[0], keys.shape[1], keys.shape[2], dim});
    KvPages pages{};
    pages.keys = rows_at(keys, keys.as<char>(), 0, 1, 2, dim);
    pages.values = rows_at(values, values.as<char>(), 0, 1, 2, dim);
    pages.num_blocks = keys.shape[0];
    pages.num_heads = keys.shape[1];
    pages.block_size = keys.shape[2];
    return pages;
}

KvPages packed(const TensorRef& keys, const TensorRef& values, std::int64_t dim) {
    const std::int64_t x = keys.shape[4];
    require(x > 0 && dim % x == 0, "key_cache", "does not divide a head's dimensions evenly");
    expect(keys, "key_cache", {kAny, kAny, dim / x, kAny, x});
    expect(values, "value_cache", {keys.shape[0], keys.shape[1], dim, keys.shape[3]});
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

KvPages kv_pages(const KvCache& kv, std::int64_t head_dim) {
    const bool both = !kv.values.given();
    const char* name = both ? "kv" : "key_cache";
    usable(kv.keys, name);
    const DType dtype = elements(kv.keys, kv.type, name);
    KvPages pages{};
    if (both) {
        pages = joint(kv.keys, dtype, head_dim);
    } else {
        usable(kv.values, "value_cache");
        require(kv.values.dtype == kv.keys.dtype, "value_cache", "is of another type than key_cache");
        pages = kv.keys.ndim == 5 ? packed(kv.keys, kv.values, head_dim) : apart(kv.keys, kv.values, head_dim);
    }
    require(pages.num_heads > 0 && pages.block_size > 0, name, "has no slots");
    pages.dtype = dtype;
    pages.head_dim = head_dim;
    require(!pages.keys.slot_scales || !(kv.key_scale.given() || kv.value_scale.given()), "k_scale",
            "is given, and so are scales of slots");
    put_scale(pages.keys, kv.key_scale, "k_scale", pages.num_heads);
    put_scale(pages.values, kv.value_scale, "v_scale", pages.num_heads);
    return pages;
}

KvPages kv_pages(const KvCache& kv) {
    const bool both = !kv.values.given(), packed = !both && kv.keys.ndim == 5;
    const char* name = both ? "kv" : "key_cache";
    usable(kv.keys, name);
    require(kv.keys.ndim == (both || packed ? 5 : 4), name, "has another number of dimensions than a cache");
    if (packed) {
        return kv_pages(kv, kv.keys.shape[2] * kv.keys.shape[4]);
    }
    const std::int64_t width = kv.keys.shape[kv.keys.ndim - 1];
    // Heads have an even number of dimensions that is a multiple of 8: two more are a page's scales.
    const bool scaled = both && size_of(kv.keys.dtype) == 1 && width % 8 == kScaleBytes;
    return kv_pages(kv, scaled ? width - kScaleBytes : width);
}

void check_slots(const TensorRef& slots, const char* name, std::int64_t num_tokens, const KvPages& pages) {
    expect(slots, name, {num_tokens}, DType::kI64);
    for (std::int64_t token = 0; token < num_tokens; ++token) {
        const std::int64_t slot = slots.as<std::int64_t>()[token];
        require(slot >= -1 && slot < pages.num_blocks * pages.block_size, name, "names a slot that is not there");
    }
}

}  // namespace octavo
