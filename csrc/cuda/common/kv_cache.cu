#include "common/kv_cache.h"

namespace octavo::cuda {
namespace {

Pages four(const TensorRef& t) {
    return {t.data, t.stride[0], t.stride[1], t.stride[2], 0, 1, static_cast<int>(t.shape[3])};
}

Pages packed_keys(const TensorRef& t) {
    return {t.data, t.stride[0], t.stride[1], t.stride[3], t.stride[2], 1, static_cast<int>(t.shape[4])};
}

Pages packed_values(const TensorRef& t) { return {t.data, t.stride[0], t.stride[1], t.stride[3], t.stride[2], 0, 1}; }

bool is_per_head(const TensorRef& scale, const char* name, std::int64_t heads) {
    if (!scale.given()) {
        return false;
    }
    expect(scale, name, {kAny}, DType::kF32);
    require(scale.shape[0] == 1 || scale.shape[0] == heads, name, "has neither 1 nor kv_head numbers");
    return scale.shape[0] > 1;
}

SlotScales slot_scales(const TensorRef& scale, const char* name, const KvLayer& layer) {
    expect(scale, name, {layer.num_blocks, layer.num_heads, layer.pages.block_size}, DType::kF16);
    require(layer.type == KvType::kInt8, name, "is for each slot, which only int8 has");
    return {scale.as<Half>(), scale.stride[0], scale.stride[1]};
}

KvScales scales_of(const KvCache& kv, const KvLayer& layer) {
    KvScales scales{};
    const TensorRef &k = kv.key_scale, &v = kv.value_scale;
    if (k.ndim == 3 || v.ndim == 3) {
        scales.key_slots = slot_scales(k, "k_scale", layer);
        scales.value_slots = slot_scales(v, "v_scale", layer);
        return scales;
    }
    const bool keys = is_per_head(k, "k_scale", layer.num_heads), values = is_per_head(v, "v_scale", layer.num_heads);
    require(!k.given() || !v.given() || keys == values, "v_scale", "is not as long as k_scale");
    return {k.as<float>(), v.as<float>(), keys || values ? 1 : 0, {}, {}};
}

}  // namespace

KvType kv_type_named(const std::string& name) {
    if (name == "auto") {
        return KvType::kSame;
    }
    if (name == "fp8" || name == "fp8_e4m3") {
        return KvType::kE4M3;
    }
    if (name == "fp8_e5m2") {
        return KvType::kE5M2;
    }
    require(name == "int8", "kv_cache_dtype", "is none of auto, fp8, fp8_e4m3, fp8_e5m2, int8");
    return KvType::kInt8;
}

KvLayer make_kv_layer(const KvCache& kv, DType activations) {
    KvLayer layer{};
    layer.type = kv_type_named(kv.type);
    const TensorRef &k = kv.keys, &v = kv.values;
    usable(k, "key_cache");
    usable(v, "value_cache");
    require(k.dtype == v.dtype, "value_cache", "is of another type than key_cache");
    if (layer.type == KvType::kSame) {
        require(k.dtype == activations, "key_cache", "is of another type than the activations");
    } else {
        require(size_of(k.dtype) == 1, "key_cache", "does not hold 8-bit numbers");
    }
    require(v.ndim == 4, "value_cache", "does not have 4 dimensions");
    if (k.ndim == 5) {
        const std::int64_t head_dim = volume({k.shape[2], k.shape[4]});
        expect(k, "key_cache", {v.shape[0], v.shape[1], kAny, v.shape[3], kAny});
        expect(v, "value_cache", {k.shape[0], k.shape[1], head_dim, k.shape[3]});
        layer.pages = {packed_keys(k), packed_values(v), static_cast<int>(k.shape[3]), 0};
        layer.head_dim = static_cast<int>(head_dim);
    } else {
        expect(k, "key_cache", {kAny, kAny, kAny, kAny});
        expect(v, "value_cache", {k.shape[0], k.shape[1], k.shape[2], k.shape[3]});
        layer.pages = {four(k), four(v), static_cast<int>(k.shape[2]), 0};
        layer.head_dim = static_cast<int>(k.shape[3]);
        layer.contiguous = true;
    }
    layer.num_blocks = layer.pages.num_blocks = static_cast<int>(k.shape[0]);
    layer.num_heads = static_cast<int>(k.shape[1]);
    require(layer.num_heads > 0 && layer.pages.block_size > 0 && layer.head_dim > 0, "key_cache", "has no slots");
    require(volume({layer.num_heads, layer.pages.block_size, layer.head_dim}) <= kMostInInt, "key_cache",
            "has blocks that are too large");
    layer.scales = scales_of(kv, layer);
    return layer;
}

void expect_writable(const KvCache& kv, std::initializer_list<const TensorRef*> others) {
    expect_apart(kv.keys, "key_cache", others);
    expect_apart(kv.values, "value_cache", others);
    for (const TensorRef* scale : {&kv.key_scale, &kv.value_scale}) {
        if (scale->ndim == 1) {  // those of slots lie in the same pages
            expect_apart(kv.keys, "key_cache", {scale});
            expect_apart(kv.values, "value_cache", {scale});
        }
    }
}

}  // namespace octavo::cuda
