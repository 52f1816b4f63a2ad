// Conversions of float16, bfloat16 and the 8-bit types by their bits, where no instruction does them. They round to
// nearest, ties to even; the 8-bit types saturate.
#pragma once

#include <cmath>
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

constexpr float kLargestHalf = 65504.0F;

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

// Sign, 4 bits of exponent, 3 of mantissa: up to 448, no infinity. Half of it is as if the exponent had 5 bits, then
// corrected by the difference of the biases.
constexpr float kE4M3Factor = 256.0F;

static inline float e4m3_to_float(std::uint8_t value) {
    if ((value & 0x7fU) == 0x7fU) {
        return float_of(static_cast<std::uint32_t>(value & 0x80U) << 24 | 0x7fc00000U);
    }
    const auto half = static_cast<std::uint16_t>((value & 0x7fU) << 7 | (value & 0x80U) << 8);
    return half_to_float(half) * kE4M3Factor;
}

// The high byte of a float16: up to 57344.
static inline float e5m2_to_float(std::uint8_t value) { return half_to_float(static_cast<std::uint16_t>(value << 8)); }

static inline std::uint8_t float_to_eight(float value, std::uint32_t mantissa, std::uint32_t bias,
                                          std::uint32_t largest, float top) {
    const std::uint32_t bits = bits_of(value), sign = bits >> 24 & 0x80U, size = bits & 0x7fffffffU;
    const std::uint32_t drop = 23 - mantissa, low = 127 - bias;  // low: exponent of what becomes exponent 0
    std::uint32_t rounded;
    if (size > 0x7f800000U) {
        rounded = 0x7fU;
    } else if (size >= bits_of(top)) {
        rounded = largest;
    } else if (size >> 23 <= low) {  // below the normal range: adding a number whose last place is one unit rounds
        const std::uint32_t unit = (24 + low - mantissa) << 23;
        rounded = bits_of(float_of(size) + float_of(unit)) - unit;
    } else {
        rounded = (size + (1U << (drop - 1)) - 1 + (size >> drop & 1U)) >> drop;
        rounded -= low << mantissa;
    }
    return static_cast<std::uint8_t>(sign | rounded);
}

static inline std::uint8_t float_to_e4m3(float value) { return float_to_eight(value, 3, 7, 0x7eU, 448.0F); }
static inline std::uint8_t float_to_e5m2(float value) { return float_to_eight(value, 2, 15, 0x7bU, 57344.0F); }

// To [-127, 127]; NaN to -127.
static inline std::int8_t float_to_int8(float value) {
    const float above = value > -127.0F ? value : -127.0F;
    return static_cast<std::int8_t>(std::nearbyintf(above < 127.0F ? above : 127.0F));
}

}  // namespace octavo
