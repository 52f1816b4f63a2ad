// Activations of single numbers in plain C++: the same bits on every instruction set, several numbers at once where a
// compiler makes it so.
#pragma once

#include <cstdint>

namespace octavo {

// gelu(gate) * up, by the tanh that approximates GELU.
void gelu_mul(const float* gate, const float* up, std::int64_t count, float* out);

// cap * tanh(x / cap), in place.
void soft_cap(float* x, float cap, std::int64_t count);

}  // namespace octavo
