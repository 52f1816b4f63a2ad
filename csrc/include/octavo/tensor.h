// The tensors that ops are given: where a tensor lies, its type, shape and strides. Nothing here owns memory.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

namespace octavo {

enum class DType : std::uint8_t { kF32, kF16, kBF16, kU8, kI8, kI32, kI64, kE4M3, kE5M2 };

std::int64_t size_of(DType dtype);
const char* name_of(DType dtype);

constexpr int kMaxDims = 6;
constexpr std::int64_t kMostElements = std::int64_t{1}
                                       << 48;  // no memory has more; so products of sizes fit into 64 bits

// The product of sizes, which are not negative; at most kMostElements.
std::int64_t volume(std::initializer_list<std::int64_t> sizes);

// Strides are counted in elements.
struct TensorRef {
    void* data = nullptr;
    std::int64_t shape[kMaxDims] = {};
    std::int64_t stride[kMaxDims] = {};
    int ndim = 0;
    DType dtype = DType::kF32;
    const char* problem = nullptr;  // why no op can read it; the op adds the argument's name

    std::int64_t size() const;  // at most kMostElements
    bool given() const { return data != nullptr || problem != nullptr; }
    bool is_float() const { return dtype <= DType::kBF16; }
    template <typename T>
    T* as() const {
        return static_cast<T*>(data);
    }
};

// Thrown for an argument that an op cannot work with, before any of its memory is touched.
class ArgumentError : public std::invalid_argument {
  public:
    ArgumentError(const std::string& name, const std::string& problem) : std::invalid_argument(name + ": " + problem) {}
};

inline void require(bool good, const char* name, const char* problem) {
    if (!good) {
        throw ArgumentError(name, problem);
    }
}

// Throws unless an op can read the tensor at all.
inline void usable(const TensorRef& tensor, const char* name) {
    require(tensor.problem == nullptr, name, tensor.problem);
    require(tensor.data != nullptr || tensor.size() == 0, name, "is missing");
    require(tensor.size() < kMostElements, name, "has more elements than there is memory");
}

// A dimension of any size, in `expect`.
constexpr std::int64_t kAny = -1;

// Throws unless the tensor has this shape (kAny matches every size) and type, and its last dimension is contiguous.
void expect(const TensorRef& tensor, const char* name, std::initializer_list<std::int64_t> shape);
void expect(const TensorRef& tensor, const char* name, std::initializer_list<std::int64_t> shape, DType dtype);

// Throws unless the elements lie without gaps, in order.
void expect_dense(const TensorRef& tensor, const char* name);

// For a tensor that is written: throws unless its elements lie apart, from each other and from those of `others`.
// Interleaved rows may count as overlapping if their strides differ.
void expect_apart(const TensorRef& out, const char* name, std::initializer_list<const TensorRef*> others);

// Like expect_apart, but the tensor may also be one of `others`: begin where it begins, with its type and strides.
void expect_apart_or_same(const TensorRef& out, const char* name, std::initializer_list<const TensorRef*> others);

}  // namespace octavo
