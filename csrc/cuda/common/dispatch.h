// Calls a function template with the type that a tensor has at run time.
#pragma once

#include <algorithm>

#include "api.h"
#include "common/numeric.cuh"
#include "common/pages.cuh"
#include "octavo/tensor.h"

namespace octavo::cuda {

template <typename T>
struct Tag {
    using Type = T;
};

inline Stream as_stream(StreamHandle stream) { return static_cast<Stream>(stream); }

// Whether groups of eight elements, counted from the start of any row, lie at multiples of 16 bytes (of 8, for bytes).
// Dimensions before `last` are rows. A tensor without data counts as aligned.
inline bool whole_rows(std::initializer_list<const TensorRef*> tensors, int last) {
    for (const TensorRef* tensor : tensors) {
        const std::int64_t size = size_of(tensor->dtype), piece = size == 1 ? 8 : 16;
        bool whole = reinterpret_cast<std::uintptr_t>(tensor->data) % static_cast<std::uintptr_t>(piece) == 0;
        for (int i = 0; i < std::min(last, tensor->ndim); ++i) {
            whole = whole && (tensor->shape[i] == 1 || tensor->stride[i] * size % piece == 0);
        }
        if (tensor->data && !whole) {
            return false;
        }
    }
    return true;
}

// body(Tag<T>) for float32, float16 or bfloat16.
template <typename Body>
void with_float(DType dtype, const char* name, Body body) {
    switch (dtype) {
        case DType::kF32:
            return body(Tag<float>{});
        case DType::kF16:
            return body(Tag<Half>{});
        case DType::kBF16:
            return body(Tag<BFloat>{});
        default:
            throw ArgumentError(name, std::string("is ") + name_of(dtype) + ", not a float type");
    }
}

// body(Tag<T>, Tag<C>): T of activations, C of what blocks hold.
template <typename Body>
void with_kv(DType dtype, KvType kv, const char* name, Body body) {
    with_float(dtype, name, [&](auto t) -> void {
        switch (kv) {
            case KvType::kSame:
                return body(t, t);
            case KvType::kE4M3:
                return body(t, Tag<E4M3>{});
            case KvType::kE5M2:
                return body(t, Tag<E5M2>{});
            case KvType::kInt8:
                return body(t, Tag<std::int8_t>{});
        }
    });
}

}  // namespace octavo::cuda
