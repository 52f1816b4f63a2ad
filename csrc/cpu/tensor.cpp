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

// Two tensors, dimension by dimension: those with longer strides first, without those of one element in both.
struct Dims {
    struct Dim {
        std::int64_t count_a, count_b;    // elements
        std::int64_t stride_a, stride_b;  // bytes
        bool alike() const { return count_a == 1 || count_b == 1 || stride_a == stride_b; }
        std::int64_t step() const { return count_a > 1 ? stride_a : stride_b; }
    };

    Dims(const TensorRef& a, const TensorRef& b) : a_size(size_of(a.dtype)), b_size(size_of(b.dtype)) {
        for (int i = 0; i < std::max(a.ndim, b.ndim); ++i) {
            Dim dim{1, 1, 0, 0};
            if (i < a.ndim) {
                dim.count_a = a.shape[i];
                dim.stride_a = a.stride[i] * a_size;
            }
            if (i < b.ndim) {
                dim.count_b = b.shape[i];
                dim.stride_b = b.stride[i] * b_size;
            }
            if (dim.count_a > 1 || dim.count_b > 1) {
                dims[count++] = dim;
            }
        }
        std::stable_sort(dims, dims + count, [](const Dim& x, const Dim& y) { return x.step() > y.step(); });
    }

    // Bytes from the first to behind the last of what dimensions from `first` on reach.
    std::int64_t reach_a(int first) const {
        return std::accumulate(dims + first, dims + count, a_size,
                               [](std::int64_t sum, const Dim& dim) { return sum + (dim.count_a - 1) * dim.stride_a; });
    }
    std::int64_t reach_b(int first) const {
        return std::accumulate(dims + first, dims + count, b_size,
                               [](std::int64_t sum, const Dim& dim) { return sum + (dim.count_b - 1) * dim.stride_b; });
    }

    Dim dims[kMaxDims];
    int count = 0;
    std::int64_t a_size, b_size;
};

constexpr std::int64_t kMostNear = 4;  // rows of one that come near a row of the other: more are tangled

// Whether no element of one lies where one of the other does, as far as ranges of memory tell: where both have rows at
// the same distance, those of each pair of rows that come near each other. b begins `shift` bytes behind a.
bool apart(const Dims& both, int first, std::int64_t shift) {
    if (shift >= both.reach_a(first) || -shift >= both.reach_b(first)) {
        return true;
    }
    if (first == both.count || !both.dims[first].alike() || both.dims[first].step() <= 0) {
        return false;
    }
    const Dims::Dim& dim = both.dims[first];
    const std::int64_t step = dim.step(), behind = both.reach_b(first + 1), ahead = both.reach_a(first + 1);
    const auto below = [step](std::int64_t x) { return x / step - (x % step < 0 ? 1 : 0); };
    // Row i of a and row i + k of b are shift + k * step apart, which is near if between -behind and ahead.
    const std::int64_t least = std::max(1 - dim.count_a, below(-behind - shift) + 1);
    const std::int64_t most = std::min(dim.count_b - 1, below(ahead - shift - 1));
    bool found = most - least < kMostNear;
    for (std::int64_t k = least; found && k <= most; ++k) {
        found = apart(both, first + 1, shift + k * step);
    }
    return found;
}

bool apart(const TensorRef& a, const TensorRef& b) {
    const auto a_begin = reinterpret_cast<std::intptr_t>(a.data), b_begin = reinterpret_cast<std::intptr_t>(b.data);
    return a.size() == 0 || b.size() == 0 || apart(Dims(a, b), 0, b_begin - a_begin);
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
