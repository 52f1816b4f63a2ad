// Reads an element of a tensor of any type exactly, as a double, and writes one rounded once: to nearest, ties to even.
// 8-bit floats saturate, and so does int8, which holds -127 to 127 and no NaN.
#pragma once

#include "octavo/tensor.h"

namespace octavo::ref {

double read(const void* at, DType dtype);
void write(void* at, DType dtype, double value);

// Where element [i, j, ...] is.
template <typename... Index>
char* at(const TensorRef& tensor, Index... index) {
    std::int64_t offset = 0;
    int dim = 0;
    ((offset += static_cast<std::int64_t>(index) * tensor.stride[dim++]), ...);
    return tensor.as<char>() + offset * size_of(tensor.dtype);
}

template <typename... Index>
double get(const TensorRef& tensor, Index... index) {
    return read(at(tensor, index...), tensor.dtype);
}

template <typename... Index>
void put(const TensorRef& tensor, double value, Index... index) {
    write(at(tensor, index...), tensor.dtype, value);
}

template <typename... Index>
std::int64_t get_int(const TensorRef& tensor, Index... index) {
    return static_cast<std::int64_t>(get(tensor, index...));
}

}  // namespace octavo::ref
