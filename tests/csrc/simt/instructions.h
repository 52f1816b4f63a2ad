// The names of arch/ptx.cuh and arch/bulk.cuh.
#pragma once

#include <cstdint>
#include <type_traits>

#include "simt/language.h"

namespace octavo::cuda {

struct Half {
    std::uint16_t bits;
};
struct BFloat {
    std::uint16_t bits;
};

template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, Half>;

inline std::uint32_t bits_of(float x) {
    std::uint32_t y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}
inline float float_of(std::uint32_t x) {
    float y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

inline float to_float(Half x) {
    const std::uint32_t sign = (x.bits & 0x8000U) << 16, rest = x.bits & 0x7fffU;
    if (rest >= 0x7c00U) {
        return float_of(sign | 0x7f800000U | (rest & 0x3ffU) << 13);
    }
    // As if the exponent had 8 bits, then corrected by 2^112: right for numbers below the normal range, too.
    return float_of(sign | bits_of(float_of(rest << 13) * float_of(0x77800000U)));
}
inline float to_float(BFloat x) { return float_of(static_cast<std::uint32_t>(x.bits) << 16); }

inline void from_float(float x, Half& y) {
    const double size = std::fabs(static_cast<double>(x));
    const std::uint32_t sign = bits_of(x) >> 16 & 0x8000U;
    std::uint32_t half;
    if (std::isnan(x)) {
        half = 0x7fffU;
    } else if (size >= 65520.0) {
        half = 0x7c00U;
    } else {
        const int exponent = size < 6.103515625e-05 ? -14 : std::ilogb(size);
        const auto units = static_cast<std::uint32_t>(std::nearbyint(std::ldexp(size, 10 - exponent)));
        half = static_cast<std::uint32_t>(exponent + 14) * 1024U + units;
    }
    y.bits = static_cast<std::uint16_t>(sign | half);
}
inline void from_float(float x, BFloat& y) {
    const std::uint32_t b = bits_of(x);
    y.bits = static_cast<std::uint16_t>(std::isnan(x) ? 0x7fffU : (b + 0x7fffU + (b >> 16 & 1U)) >> 16);
}

template <typename T>
std::uint32_t pack(float low, float high) {
    T a, b;
    from_float(low, a);
    from_float(high, b);
    return static_cast<std::uint32_t>(b.bits) << 16 | a.bits;
}
template <typename T>
float low_of(std::uint32_t x) {
    return to_float(T{static_cast<std::uint16_t>(x & 0xffffU)});
}
template <typename T>
float high_of(std::uint32_t x) {
    return to_float(T{static_cast<std::uint16_t>(x >> 16)});
}
template <typename T>
std::uint32_t mul2(std::uint32_t a, std::uint32_t b) {
    return pack<T>(low_of<T>(a) * low_of<T>(b), high_of<T>(a) * high_of<T>(b));
}
template <typename T>
std::uint32_t sub2(std::uint32_t a, std::uint32_t b) {
    return pack<T>(low_of<T>(a) - low_of<T>(b), high_of<T>(a) - high_of<T>(b));
}

inline std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
    const std::uint64_t both = static_cast<std::uint64_t>(b) << 32 | a;
    std::uint32_t y = 0;
    for (int i = 0; i < 4; ++i) {
        y |= static_cast<std::uint32_t>(both >> 8 * (selector >> 4 * i & 7U) & 0xffU) << 8 * i;
    }
    return y;
}

// By chance: kernels must give the same bits with the instructions for fp8 and without.
inline bool converts_fp8() { return simt::chance() % 2 == 0; }
std::uint16_t half_of_fp8(std::uint8_t x, bool e5m2);
std::uint8_t fp8_of_float(float x, bool e5m2);
template <bool kE5M2>
std::uint32_t halves_of_fp8(std::uint32_t x) {
    const auto half = [](std::uint32_t byte) { return half_of_fp8(static_cast<std::uint8_t>(byte), kE5M2); };
    return static_cast<std::uint32_t>(half(x >> 8)) << 16 | half(x);
}
template <bool kE5M2>
std::uint16_t fp8_of(float low, float high) {
    return static_cast<std::uint16_t>(fp8_of_float(high, kE5M2) << 8 | fp8_of_float(low, kE5M2));
}

inline float fast_exp2(float x) { return std::exp2(x); }

// Arrives at once or only when it is waited for, by chance.
void copy_async16(void* to, const void* from, bool valid);
void commit_copies();
void wait_copies_but(std::size_t pending);
template <int kPending>
void wait_copies() {
    wait_copies_but(kPending);
}

void load_matrices(std::uint32_t (&r)[4], const void* row);
void load_matrices_transposed(std::uint32_t (&r)[4], const void* row);
std::uint32_t transpose_matrix(std::uint32_t x);
template <typename T>
void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);
extern template void multiply_add<Half>(float (&)[4], const std::uint32_t (&)[4], std::uint32_t, std::uint32_t);
extern template void multiply_add<BFloat>(float (&)[4], const std::uint32_t (&)[4], std::uint32_t, std::uint32_t);
void multiply_add_e4m3(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);

// A copy in bulk arrives at any time between its call and the end of the phase that waits for it.
using BulkBarrier = std::uint64_t;
void make_barrier(BulkBarrier* barrier, unsigned arrivals);
void publish_barriers();
void arrive(BulkBarrier* barrier);
void arrive_expecting(BulkBarrier* barrier, unsigned bytes);
void wait_for_phase(BulkBarrier* barrier, unsigned parity);
void copy_bulk(void* to, const void* from, unsigned bytes, BulkBarrier* barrier);

inline std::int32_t add_acquire_release(std::int32_t* p, std::int32_t x) { return atomicAdd(p, x); }
inline float load_shared_result(const float* p) { return *p; }
inline void load_shared_results(const float* p, float (&x)[1]) { x[0] = *p; }
void load_shared_results(const float* p, float (&x)[4]);

}  // namespace octavo::cuda
