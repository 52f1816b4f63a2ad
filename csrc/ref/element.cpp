#include "element.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace octavo::ref {
namespace {

// A binary floating-point format of 8 or 16 bits, as IEEE 754 lays them out; or (`finite`) with all of its largest
// exponent for numbers but the last pattern, which is NaN.
struct Layout {
    int exponent_bits, mantissa_bits;
    bool finite = false;

    int bias() const { return (1 << (exponent_bits - 1)) - 1; }
    int infinity() const { return finite ? magnitudes() : ((1 << exponent_bits) - 1) << mantissa_bits; }
    int magnitudes() const { return (1 << (exponent_bits + mantissa_bits)) - 1; }  // all their bits
};

constexpr Layout kHalf{5, 10}, kBfloat{8, 7}, kE4M3{4, 3, true}, kE5M2{5, 2};

double decode(int bits, const Layout& layout) {
    const int magnitude = bits & layout.magnitudes(), exponent = magnitude >> layout.mantissa_bits;
    const int mantissa = magnitude & ((1 << layout.mantissa_bits) - 1), hidden = 1 << layout.mantissa_bits;
    double value = 0;
    if (magnitude > layout.infinity() || (layout.finite && magnitude == layout.infinity())) {
        value = std::numeric_limits<double>::quiet_NaN();
    } else if (magnitude == layout.infinity()) {
        value = std::numeric_limits<double>::infinity();
    } else if (exponent == 0) {
        value = std::ldexp(mantissa, 1 - layout.bias() - layout.mantissa_bits);
    } else {
        value = std::ldexp(mantissa + hidden, exponent - layout.bias() - layout.mantissa_bits);
    }
    return bits > layout.magnitudes() ? -value : value;
}

int encode(double value, const Layout& layout) {
    const int sign = std::signbit(value) ? layout.magnitudes() + 1 : 0, lowest = 1 - layout.bias(),
              hidden = 1 << layout.mantissa_bits;
    if (std::isnan(value)) {
        return layout.infinity() + hidden / 2;
    }
    const double magnitude = std::fabs(value);
    if (!layout.finite && magnitude >= std::ldexp(1.0, layout.bias() + 1)) {
        return sign | layout.infinity();
    }
    const int exponent = magnitude < std::ldexp(1.0, lowest) ? lowest : std::ilogb(magnitude);
    const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, layout.mantissa_bits - exponent)));
    // Below `hidden` steps it is subnormal: exponent 0. A carry out of the mantissa makes the next exponent, or
    // infinity.
    return sign | (((exponent - lowest) << layout.mantissa_bits) + steps);
}

std::uint8_t encode_eight(double value, const Layout& layout) {
    if (std::isnan(value)) {
        return static_cast<std::uint8_t>((std::signbit(value) ? 0x80 : 0) | 0x7f);
    }
    const double largest = decode(layout.infinity() - 1, layout);
    return static_cast<std::uint8_t>(
        encode(std::fabs(value) > largest ? std::copysign(largest, value) : value, layout));
}

std::int8_t encode_int8(double value) {
    return static_cast<std::int8_t>(std::isnan(value) ? -127 : std::nearbyint(std::fmax(std::fmin(value, 127), -127)));
}

template <typename T>
T load(const void* at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <typename T>
void store(void* at, T value) {
    std::memcpy(at, &value, sizeof value);
}

}  // namespace

double read(const void* at, DType dtype) {
    switch (dtype) {
        case DType::kF32:
            return static_cast<double>(load<float>(at));
        case DType::kF16:
            return decode(load<std::uint16_t>(at), kHalf);
        case DType::kBF16:
            return decode(load<std::uint16_t>(at), kBfloat);
        case DType::kE4M3:
            return decode(load<std::uint8_t>(at), kE4M3);
        case DType::kE5M2:
            return decode(load<std::uint8_t>(at), kE5M2);
        case DType::kU8:
            return load<std::uint8_t>(at);
        case DType::kI8:
            return load<std::int8_t>(at);
        case DType::kI32:
            return load<std::int32_t>(at);
        case DType::kI64:
            return static_cast<double>(load<std::int64_t>(at));
    }
    return 0;
}

void write(void* at, DType dtype, double value) {
    switch (dtype) {
        case DType::kF32:
            return store(at, static_cast<float>(value));
        case DType::kF16:
            return store(at, static_cast<std::uint16_t>(encode(value, kHalf)));
        case DType::kBF16:
            return store(at, static_cast<std::uint16_t>(encode(value, kBfloat)));
        case DType::kE4M3:
            return store(at, encode_eight(value, kE4M3));
        case DType::kE5M2:
            return store(at, encode_eight(value, kE5M2));
        case DType::kU8:
            return store(at, static_cast<std::uint8_t>(value));
        case DType::kI8:
            return store(at, encode_int8(value));
        case DType::kI32:
            return store(at, static_cast<std::int32_t>(value));
        case DType::kI64:
            return store(at, static_cast<std::int64_t>(value));
    }
}

}  // namespace octavo::ref
