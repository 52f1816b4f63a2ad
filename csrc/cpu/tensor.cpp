#include "octavo/tensor.h"

#include <algorithm>
#include <numeric>

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

namespace {

std::int64_t product(const std::int64_t* begin, const std::int64_t* end) {
    if (std::find(begin, end, 0) != end) {
        return 0;
    }
    return std::accumulate(begin, end, std::int64_t{1}, [](std::int64_t count, std::int64_t size) {
        return count > kMostElements / size ? kMostElements : count * size;
    });
}

std::string list(const std::int64_t* values, std::size_t count) {
    std::string text = "[";
    for (std::size_t i = 0; i < count; ++i) {
        text += (i ? ", " : "") + (values[i] == kAny ? std::string("*") : std::to_string(values[i]));
    }
    return text + "]";
}

constexpr std::int64_t kDims[kMaxDims] = {0, 1, 2, 3, 4, 5};

// Elements from the first to behind the last of those in dimensions from `dim` on.
std::int64_t reach(const TensorRef& tensor, int dim) {
    std::int64_t last = 0;
    for (int i = dim; i < tensor.ndim; ++i) {
        last += (tensor.shape[i] - 1) * tensor.stride[i];
    }
    return last + 1;
}

// Whether no element of one lies where one of the other does, as far as memory ranges tell: those of the whole tensors,
// or those of rows that follow each other at the same distance.
bool apart(const TensorRef& a, const TensorRef& b) {
    if (a.size() == 0 || b.size() == 0) {
        return true;
    }
    const std::int64_t a_size = size_of(a.dtype), b_size = size_of(b.dtype);
    const auto a_begin = reinterpret_cast<std::intptr_t>(a.data), b_begin = reinterpret_cast<std::intptr_t>(b.data);
    if (a_begin + reach(a, 0) * a_size <= b_begin || b_begin + reach(b, 0) * b_size <= a_begin) {
        return true;
    }
    const std::int64_t row = a.ndim > 1 ? a.stride[0] * a_size : 0;
    if (row <= 0 || b.ndim <= 1 || b.stride[0] * b_size != row) {
        return false;
    }
    const std::int64_t shift = ((b_begin - a_begin) % row + row) % row;
    return shift >= reach(a, 1) * a_size && shift + reach(b, 1) * b_size <= row;
}

bool same_places(const TensorRef& a, const TensorRef& b) {
    bool same = a.data == b.data && a.dtype == b.dtype && a.ndim == b.ndim;
    for (int i = 0; same && i < a.ndim; ++i) {
        same = a.stride[i] == b.stride[i] || (a.shape[i] == 1 && b.shape[i] == 1);
    }
    return same;
}

bool overlaps_itself(const TensorRef& tensor) {
    std::int64_t reached = 0;  // by the dimensions with lesser strides
    std::int64_t order[kMaxDims];
    std::int64_t* const end =
        std::copy_if(kDims, kDims + tensor.ndim, order, [&](auto i) { return tensor.shape[i] > 1; });
    for (std::int64_t* next = order; next != end; ++next) {
        std::iter_swap(
            next, std::min_element(next, end, [&](auto i, auto j) { return tensor.stride[i] < tensor.stride[j]; }));
        if (tensor.stride[*next] <= reached) {
            return true;
        }
        reached += tensor.stride[*next] * (tensor.shape[*next] - 1);
    }
    return false;
}

}  // namespace

std::int64_t volume(std::initializer_list<std::int64_t> sizes) { return product(sizes.begin(), sizes.end()); }

std::int64_t TensorRef::size() const { return product(shape, shape + ndim); }

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
    for (int i = tensor.ndim - 1; i >= 0 && tensor.size() > 0; --i) {
        require(tensor.shape[i] == 1 || tensor.stride[i] == stride, name, "is not contiguous");
        stride *= tensor.shape[i];
    }
}

void expect_apart(const TensorRef& out, const char* name, std::initializer_list<const TensorRef*> others) {
    require(out.size() == 0 || !overlaps_itself(out), name, "overlaps itself");
    for (const TensorRef* other : others) {
        require(apart(out, *other), name, "overlaps another argument");
    }
}

void expect_apart_or_same(const TensorRef& out, const char* name, std::initializer_list<const TensorRef*> others) {
    expect_apart(out, name, {});
    for (const TensorRef* other : others) {
        require(same_places(out, *other) || apart(out, *other), name, "overlaps another argument");
    }
}

}  // namespace octavo
