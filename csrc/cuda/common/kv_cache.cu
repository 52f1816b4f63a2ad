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

int check_scale(const TensorRef& scale, const char* name, std::int64_t heads) {
    if (!scale.data) {
        return 0;
    }
    require(scale.dtype == DType::kF32, name, "is not float32");
    require(scale.size() == 1 || (scale.ndim == 1 && scale.shape[0] == heads), name,
            "has neither 1 nor kv_head numbers");
    return scale.size() == 1 ? 0 : 1;
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
    require(k.dtype == v.dtype, "value_cache", "is of another type than key_cache");
    if (layer.type == KvType::kSame) {
        require(k.dtype == activations, "key_cache", "is of another type than the activations");
    } else {
        require(size_of(k.dtype) == 1, "key_cache", "does not hold 8-bit numbers");
    }
    require(v.ndim == 4, "value_cache", "does not have 4 dimensions");
    if (k.ndim == 5) {
        const std::int64_t head_dim = k.shape[2] * k.shape[4];
        expect(k, "key_cache", {v.shape[0], v.shape[1], kAny, v.shape[3], kAny});
        expect(v, "value_cache", {k.shape[0], k.shape[1], head_dim, k.shape[3]});
        layer.pages = {packed_keys(k), packed_values(v), static_cast<int>(k.shape[3])};
        layer.head_dim = static_cast<int>(head_dim);
    } else {
        expect(k, "key_cache", {kAny, kAny, kAny, kAny});
        expect(v, "value_cache", {k.shape[0], k.shape[1], k.shape[2], k.shape[3]});
        layer.pages = {four(k), four(v), static_cast<int>(k.shape[2])};
        layer.head_dim = static_cast<int>(k.shape[3]);
        layer.contiguous = true;
    }
    layer.num_blocks = static_cast<int>(k.shape[0]);
    layer.num_heads = static_cast<int>(k.shape[1]);
    const int keys = check_scale(kv.key_scale, "k_scale", k.shape[1]);
    const int values = check_scale(kv.value_scale, "v_scale", k.shape[1]);
    require(!kv.key_scale.data || !kv.value_scale.data || keys == values, "v_scale", "is not as long as k_scale");
    layer.scales = {kv.key_scale.as<float>(), kv.value_scale.as<float>(), keys | values};
    return layer;
}

}  // namespace octavo::cuda
