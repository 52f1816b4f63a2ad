// Rotates one head by the angles of its position.
#pragma once

#include "kernels.h"

namespace octavo {

struct Rope {
    const float *cos, *sin;  // [pairs], of the position
    std::int64_t pairs;
    bool interleaved;  // dimension 2 i turns with 2 i + 1, not i with i + pairs
};

// In place. space: [2 pairs].
inline void turn(const Kernels& k, const Rope& rope, float* head, float* space) {
    if (!rope.interleaved) {
        k.rotate(head, rope.cos, rope.sin, rope.pairs, space);
        k.to_float(DType::kF32, space, 2 * rope.pairs, head);
        return;
    }
    for (std::int64_t i = 0; i < rope.pairs; ++i) {
        const float a = head[2 * i], b = head[2 * i + 1];
        head[2 * i] = a * rope.cos[i] - b * rope.sin[i];
        head[2 * i + 1] = b * rope.cos[i] + a * rope.sin[i];
    }
}

// Of one token: a row of the tables.
inline Rope rope_of(const TensorRef& positions, const TensorRef& cos, const TensorRef& sin, std::int64_t rotated,
                    std::int64_t token, bool interleaved) {
    const std::int64_t row = positions.given() ? positions.as<std::int64_t>()[token] : token;
    return {cos.as<float>() + row * cos.stride[0], sin.as<float>() + row * sin.stride[0], rotated / 2, interleaved};
}

}  // namespace octavo
