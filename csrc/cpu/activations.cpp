#include "activations.h"

#include <cstring>

namespace octavo {
namespace {

// e^x, within 2 ulp; below -87.3 next to nothing, above 88.3 infinity. NaN stays NaN.
inline float exp_of(float x) {
    float inside = x > 89.0F ? 89.0F : x;
    inside = inside < -87.33654F ? -87.33654F : inside;
    constexpr float kWhole = 12582912.0F;  // 1.5 * 2^23: what is added to it is rounded to a whole number
    const float n = (inside * 1.44269504F + kWhole) - kWhole;
    float r = inside - n * 0.693359375F;
    r = r + n * 2.12194440e-4F;
    float p = 1.9875691500e-4F * r + 1.3981999507e-3F;
    p = p * r + 8.3334519073e-3F;
    p = p * r + 4.1665795894e-2F;
    p = p * r + 1.6666665459e-1F;
    p = p * r + 5.0000001201e-1F;
    p = p * (r * r) + r + 1.0F;
    const std::int32_t bits = (static_cast<std::int32_t>(n) + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof(power));
    return p * power;
}

}  // namespace

// x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
void gelu_mul(const float* gate, const float* up, std::int64_t count, float* out) {
    for (std::int64_t i = 0; i < count; ++i) {
        const float x = gate[i], cubic = x + 0.044715F * (x * x * x);
        out[i] = x / (1.0F + exp_of(-1.59576912F * cubic)) * up[i];
    }
}

// tanh(x) = 1 - 2 / (e^2x + 1)
void soft_cap(float* x, float cap, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        x[i] = (1.0F - 2.0F / (exp_of(2.0F * (x[i] / cap)) + 1.0F)) * cap;
    }
}

}  // namespace octavo
