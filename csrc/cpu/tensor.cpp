#include "octavo/tensor.h"

namespace octavo {

std::int64_t size_of(DType dtype) {
    switch (dtype) {
        case DType::kI64:
            return 8;
        case DType::kF32:
        case DType::kI32:
            return 4;
        case DType::kF16:
        case DType::kBF16:
            return 2;
        case DType::kU8:
        case DType::kI8:
        case DType::kE4M3:
        case DType::kE5M2:
            break;
    }
    return 1;
}

const char* name_of(DType dtype) {
    constexpr const char* kNames[] = {"float32", "float16", "bfloat16",      "uint8",      "int8",
                                      "int32",   "int64",   "float8_e4m3fn", "float8_e5m2"};
    return kNames[static_cast<int>(dtype)];
}

std::int64_t TensorRef::size() const {
    std::int64_t count = 1;
    for (int i = 0; i < ndim; ++i) {
        count *= shape[i];
    }
    return count;
}

namespace {

std::string list(const std::int64_t* values, std::size_t count) {
    std::string text = "[";
    for (std::size_t i = 0; i < count; ++i) {
        text += (i ? ", " : "") + (values[i] == kAny ? std::string("*") : std::to_string(values[i]));
    }
    return text + "]";
}

}  // namespace

void expect(const TensorRef& tensor, const char* name, std::initializer_list<std::int64_t> shape) {
    usable(tensor, name);
    const std::int64_t* wanted = shape.begin();
    bool same = tensor.ndim == static_cast<int>(shape.size());
    for (int i = 0; same && i < tensor.ndim; ++i) {
        same = wanted[i] == kAny || wanted[i] == tensor.shape[i];
    }
    if (!same) {
        throw ArgumentError(name, "shape " + list(tensor.shape, static_cast<std::size_t>(tensor.ndim)) + " is not " +
                                      list(wanted, shape.size()));
    }
    const int last = tensor.ndim - 1;
    if (tensor.ndim > 0 && tensor.shape[last] > 1 && tensor.stride[last] != 1) {
        throw ArgumentError(name, "its last dimension is not contiguous");
    }
}

void expect(const TensorRef& tensor, const char* name, std::initializer_list<std::int64_t> shape, DType dtype) {
    usable(tensor, name);
    if (tensor.dtype != dtype) {
        throw ArgumentError(name, std::string("is ") + name_of(tensor.dtype) + ", not " + name_of(dtype));
    }
    expect(tensor, name, shape);
}

void expect_dense(const TensorRef& tensor, const char* name) {
    usable(tensor, name);
    std::int64_t stride = 1;
    for (int i = tensor.ndim - 1; i >= 0; --i) {
        require(tensor.shape[i] == 1 || tensor.stride[i] == stride, name, "is not contiguous");
        stride *= tensor.shape[i];
    }
}

}  // namespace octavo
