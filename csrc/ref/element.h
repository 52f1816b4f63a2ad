// An element of a tensor as a double, whatever its type: read exactly, rounded once when written (to nearest, ties to
// even; 8-bit floats, and int8, which holds -127 to 127 and no NaN, saturate).
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
