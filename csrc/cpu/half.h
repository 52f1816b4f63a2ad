// float16 and bfloat16 by bits, where no instruction does it. Rounds to nearest, ties to even.
#pragma once

#include <cstdint>
#include <cstring>

namespace octavo {

static inline std::uint32_t bits_of(float value) {
    std::uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of(std::uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float half_to_float(std::uint16_t half) {
    const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
    const std::uint32_t exponent = half >> 10 & 31U, mantissa = half & 1023U;
    if (exponent == 31) {
        return float_of(sign | 0x7f800000U | mantissa << 13 | (mantissa ? 0x400000U : 0U));
    }
    if (exponent == 0) {
        const float tiny = static_cast<float>(mantissa) * (1.0F / 16777216.0F);
        return float_of(sign | bits_of(tiny));
    }
    return float_of(sign | (exponent + 112U) << 23 | mantissa << 13);
}

static inline std::uint16_t float_to_half(float value) {
    const std::uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000U, magnitude = bits & 0x7fffffffU;
    std::uint32_t half;
    if (magnitude > 0x7f800000U) {
        half = 0x7e00U;
    } else if (magnitude >= 0x477ff000U) {
        half = 0x7c00U;
    } else if (magnitude < 0x38800000U) {  // below the normal range: adding 0.5 leaves the rounded mantissa at the end
        half = bits_of(float_of(magnitude) + 0.5F) - bits_of(0.5F);
    } else {
        half = (magnitude - 0x38000000U + 0xfffU + (magnitude >> 13 & 1U)) >> 13;
    }
    return static_cast<std::uint16_t>(sign | half);
}

static inline float bf16_to_float(std::uint16_t value) { return float_of(static_cast<std::uint32_t>(value) << 16); }

static inline std::uint16_t float_to_bf16(float value) {
    const std::uint32_t bits = bits_of(value);
    if ((bits & 0x7fffffffU) > 0x7f800000U) {
        return static_cast<std::uint16_t>(bits >> 16 | 0x40U);
    }
    return static_cast<std::uint16_t>((bits + 0x7fffU + (bits >> 16 & 1U)) >> 16);
}

}  // namespace octavo
