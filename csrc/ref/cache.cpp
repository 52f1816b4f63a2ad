#include "cache.h"

#include <cmath>
#include <limits>

#include "element.h"
#include "ref.h"

namespace octavo::ref {
namespace {

DType type_of(const KvCache& kv) {
    if (kv.type == "auto") {
        return kv.keys.dtype;
    }
    return kv.type == "int8" ? DType::kI8 : kv.type == "fp8_e5m2" ? DType::kE5M2 : DType::kE4M3;
}

Row row_of(const TensorRef& tensor, std::int64_t i, std::int64_t j) {
    Row row;
    for (std::int64_t d = 0; d < tensor.shape[2]; ++d) {
        row.push_back(get(tensor, i, j, d));
    }
    return row;
}

// What 8 bits are made of is a float32: which of two they become is part of the definition.
double quotient(double x, double scale) {
    return static_cast<double>(static_cast<float>(x) / static_cast<float>(scale));
}

}  // namespace

Cache::Cache(const KvCache& kv, std::int64_t dim)
    : head_dim(dim),
      kv_(kv),
      dtype_(type_of(kv)),
      joint_(!kv.values.given()),
      packed_(!joint_ && kv.keys.ndim == 5),
      paged_(joint_ && kv.keys.shape[4] == dim + 2) {
    heads = kv.keys.shape[1];
    block_size = kv.keys.shape[joint_ || packed_ ? 3 : 2];
}

char* Cache::element(Kind kind, std::int64_t block, std::int64_t head, std::int64_t slot, std::int64_t d) const {
    if (paged_) {
        return at(kv_.keys, block, head, static_cast<int>(kind)) + slot * head_dim + d;
    }
    if (joint_) {
        return at(kv_.keys, block, head, static_cast<int>(kind), slot, d);
    }
    const TensorRef& tensor = kind == Kind::kKeys ? kv_.keys : kv_.values;
    if (!packed_) {
        return at(tensor, block, head, slot, d);
    }
    const std::int64_t x = kv_.keys.shape[4];
    return kind == Kind::kKeys ? at(tensor, block, head, d / x, slot, d % x) : at(tensor, block, head, d, slot);
}

char* Cache::slot_scale(Kind kind, std::int64_t block, std::int64_t head, std::int64_t slot) const {
    return at(kv_.keys, block, head, static_cast<int>(kind)) + block_size * head_dim + 2 * slot;
}

double Cache::static_scale(Kind kind, std::int64_t head) const {
    const TensorRef& scale = kind == Kind::kKeys ? kv_.key_scale : kv_.value_scale;
    return scale.given() ? ref::get(scale, scale.shape[0] == 1 ? 0 : head) : 1;
}

Row Cache::get(Kind kind, std::int64_t block, std::int64_t head, std::int64_t slot) const {
    const double scale = paged_ ? read(slot_scale(kind, block, head, slot), DType::kF16) : static_scale(kind, head);
    Row row;
    for (std::int64_t d = 0; d < head_dim; ++d) {
        row.push_back(read(element(kind, block, head, slot, d), dtype_) * scale);
    }
    return row;
}

void Cache::put(Kind kind, std::int64_t block, std::int64_t head, std::int64_t slot, const Row& row) const {
    double scale = static_scale(kind, head);
    if (paged_) {
        double top = 0;
        for (const double x : row) {
            top = std::isfinite(x) ? std::fmax(top, std::fabs(x)) : std::numeric_limits<double>::quiet_NaN();
            if (std::isnan(top)) {
                break;
            }
        }
        const double scale_of_row = top / 127, largest = 65504;
        write(slot_scale(kind, block, head, slot), DType::kF16, scale_of_row > largest ? largest : scale_of_row);
        scale = read(slot_scale(kind, block, head, slot), DType::kF16);
    }
    for (std::int64_t d = 0; d < head_dim; ++d) {
        const double x = row[static_cast<std::size_t>(d)];
        write(element(kind, block, head, slot, d), dtype_, scale == 0 ? 0 : quotient(x, scale));
    }
}

void cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots) {
    check::cache_write(kv, keys, values, slots);
    const Cache cache(kv, keys.shape[2]);
    for (std::int64_t token = 0; token < keys.shape[0]; ++token) {
        const std::int64_t slot = get_int(slots, token), block = slot / cache.block_size;
        for (std::int64_t head = 0; slot >= 0 && head < cache.heads; ++head) {
            cache.put(Kind::kKeys, block, head, slot % cache.block_size, row_of(keys, token, head));
            cache.put(Kind::kValues, block, head, slot % cache.block_size, row_of(values, token, head));
        }
    }
}

}  // namespace octavo::ref
