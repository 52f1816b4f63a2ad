// Checks the angles that heads are rotated by.
#pragma once

#include "octavo/tensor.h"

namespace octavo::cuda {

// cos, sin [rows, rotated / 2 or more]; the row of a token is positions[token], or without positions the token.
inline void expect_angles(const TensorRef& positions, const TensorRef& cos, const TensorRef& sin, std::int64_t tokens,
                          int rotated, std::int64_t head_dim) {
    require(rotated > 0 && rotated % 2 == 0 && rotated <= head_dim, "rotated",
            "is not an even number of a head's dimensions");
    expect(cos, "cos", {kAny, kAny});
    expect(sin, "sin", {cos.shape[0], kAny}, cos.dtype);
    require(cos.shape[1] >= rotated / 2, "cos", "has too few columns");
    require(sin.shape[1] >= rotated / 2, "sin", "has too few columns");
    if (positions.given()) {
        expect(positions, "positions", {tokens}, DType::kI64);
    } else {
        require(cos.shape[0] == tokens, "cos", "has another number of rows than there are tokens");
    }
}

}  // namespace octavo::cuda
