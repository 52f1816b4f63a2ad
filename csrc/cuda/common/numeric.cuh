// The types of elements and their conversions: float, Half and BFloat (arch/), and the types of stored keys and values.
#pragma once

#include <cstdint>
#include <type_traits>

#include "arch/simt.h"

namespace octavo::cuda {

struct E4M3 {  // sign, 4 bits of exponent, 3 of mantissa; no infinity; the largest is 448
    std::uint8_t bits;
};
struct E5M2 {  // the high byte of a Half; the largest is 57344
    std::uint8_t bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ void from_float(float x, float& y) { y = x; }

__device__ __forceinline__ float to_float(std::int8_t x) { return static_cast<float>(x); }
__device__ __forceinline__ void from_float(float x, std::int8_t& y) {
    y = static_cast<std::int8_t>(fminf(fmaxf(rintf(x), -127.0F), 127.0F));
}

// Both of a pair of halves.
__device__ __forceinline__ void to_floats(std::uint32_t halves, float& low, float& high) {
    low = to_float(Half{static_cast<std::uint16_t>(halves)});
    high = to_float(Half{static_cast<std::uint16_t>(halves >> 16)});
}

__device__ __forceinline__ float to_float(E5M2 x) { return to_float(Half{static_cast<std::uint16_t>(x.bits << 8)}); }
__device__ __forceinline__ float to_float(E4M3 x) {
    if (converts_fp8()) {
        return to_float(Half{static_cast<std::uint16_t>(halves_of_fp8<false>(x.bits))});
    }
    // As if the exponent had 5 bits, then corrected by the difference of the biases.
    const std::uint32_t half = (x.bits & 0x7fU) << 7 | (x.bits & 0x80U) << 8;
    const float y = to_float(Half{static_cast<std::uint16_t>(half)}) * 256.0F;
    return (x.bits & 0x7fU) == 0x7fU ? float_of(0x7fffffffU) : y;
}

// How pairs of fp8 numbers become 16-bit ones: see tile.cuh.
struct Fp8Constants {
    std::uint32_t shift, scale, carry, mask, factor;
    bool e5m2;
};

// To nearest, ties to even; what is too large becomes the largest number, NaN a positive NaN: as the instructions do
// it.
template <int kMantissa, int kBias, std::uint32_t kLargest>
__device__ __forceinline__ std::uint8_t to_eight_bits(float x, float largest, float smallest_normal) {
    const std::uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80U, size = bits & 0x7fffffffU;
    const float magnitude = float_of(size);
    std::uint32_t y;
    if (size > 0x7f800000U) {
        return 0x7fU;
    }
    if (magnitude >= largest) {
        y = kLargest;
    } else if (magnitude < smallest_normal) {  // adding a number whose last place is worth one unit rounds to units
        constexpr std::uint32_t kUnits = static_cast<std::uint32_t>(23 - kMantissa - kBias + 1 + 127) << 23;
        y = bits_of(magnitude + float_of(kUnits)) - kUnits;
    } else {
        constexpr int kDrop = 23 - kMantissa;
        const std::uint32_t rounded = size + (1U << (kDrop - 1)) - 1 + (size >> kDrop & 1U);
        y = (rounded >> kDrop) - (static_cast<std::uint32_t>(127 - kBias) << kMantissa);
        y = y > kLargest ? kLargest : y;
    }
    return static_cast<std::uint8_t>(sign | y);
}
__device__ __forceinline__ void from_float(float x, E4M3& y) {
    y.bits = converts_fp8() ? static_cast<std::uint8_t>(fp8_of<false>(x, 0.0F))
                            : to_eight_bits<3, 7, 0x7eU>(x, 448.0F, 0.015625F);
}
__device__ __forceinline__ void from_float(float x, E5M2& y) {
    y.bits = converts_fp8() ? static_cast<std::uint8_t>(fp8_of<true>(x, 0.0F))
                            : to_eight_bits<2, 15, 0x7bU>(x, 57344.0F, 6.103515625e-05F);
}

// Neighbours that fill 16 bytes, which is where they lie.
template <typename T>
struct Packet {
    static constexpr int kCount = 16 / static_cast<int>(sizeof(T));
    T at[kCount];
};

template <typename T>
__device__ __forceinline__ Packet<T> load_packet(const T* from) {
    const uint4 bytes = *reinterpret_cast<const uint4*>(from);
    Packet<T> x;
    memcpy(&x, &bytes, sizeof x);
    return x;
}

template <typename T>
constexpr bool kIsFp8 = std::is_same_v<T, E4M3> || std::is_same_v<T, E5M2>;

// Many at once: fp8 in pairs, where there are instructions for it.
template <typename T, int kCount>
__device__ __forceinline__ void to_floats(const T (&x)[kCount], float (&y)[kCount]) {
    if constexpr (std::is_same_v<T, E4M3>) {
        if (converts_fp8()) {
#pragma unroll
            for (int i = 0; i < kCount; i += 2) {
                to_floats(halves_of_fp8<false>(x[i].bits | x[i + 1].bits << 8), y[i], y[i + 1]);
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        y[i] = to_float(x[i]);
    }
}
template <typename T, int kCount>
__device__ __forceinline__ void from_floats(const float (&x)[kCount], T (&y)[kCount]) {
    if constexpr (kIsFp8<T>) {
        if (converts_fp8()) {
#pragma unroll
            for (int i = 0; i < kCount; i += 2) {
                const std::uint16_t pair = fp8_of<std::is_same_v<T, E5M2>>(x[i], x[i + 1]);
                y[i].bits = static_cast<std::uint8_t>(pair);
                y[i + 1].bits = static_cast<std::uint8_t>(pair >> 8);
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
        from_float(x[i], y[i]);
    }
}

// Eight neighbours, moved as one or two pieces where their place is a multiple of their size or of 16 bytes (`whole`),
// else one by one. The host decides it: `whole` is the same for all threads.
template <typename T>
struct Eight {
    T at[8];
};

template <typename T>
struct Piece {
    using Type = uint4;
};
template <>
struct Piece<E4M3> {
    using Type = std::uint64_t;
};
template <>
struct Piece<E5M2> {
    using Type = std::uint64_t;
};
template <>
struct Piece<std::int8_t> {
    using Type = std::uint64_t;
};

template <typename T>
__device__ __forceinline__ Eight<T> load_eight(const T* from, bool whole) {
    using P = typename Piece<T>::Type;
    constexpr int kPieces = sizeof(Eight<T>) / sizeof(P);
    Eight<T> x;
    if (whole) {
        P pieces[kPieces];
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            pieces[i] = reinterpret_cast<const P*>(from)[i];
        }
        memcpy(&x, pieces, sizeof x);
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x.at[i] = from[i];
        }
    }
    return x;
}

template <typename T>
__device__ __forceinline__ void store_eight(T* to, const Eight<T>& x, bool whole) {
    using P = typename Piece<T>::Type;
    constexpr int kPieces = sizeof(Eight<T>) / sizeof(P);
    if (whole) {
        P pieces[kPieces];
        memcpy(pieces, &x, sizeof x);
#pragma unroll
        for (int i = 0; i < kPieces; ++i) {
            reinterpret_cast<P*>(to)[i] = pieces[i];
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            to[i] = x.at[i];
        }
    }
}

}  // namespace octavo::cuda
