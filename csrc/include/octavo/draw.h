// The arithmetic of a draw: the same bits on every processor, on a GPU, and in gpu_worker/sampling/draw.py.
//
// A token's weight is 2^40 e^((logit - highest) / temperature) as a whole number, so that sums do not depend on their
// order. It is made of float32 operations that are each rounded on their own. A compiler must not fuse a product with a
// sum here, so the files that loop over these functions are compiled without FMA.
#pragma once

#include <cstdint>
#include <cstring>

#include "octavo/anywhere.h"

namespace octavo::draw {

constexpr int kWeightBits = 40;  // the likeliest token's weight is 2^40
constexpr float kLogTwoOfE = 1.44269504F;
constexpr float kLeastTemperature = 1e-30F;  // below, float32 would multiply 0 by infinity
constexpr float kLowestPower = -64.0F;       // of two; all below -41 weigh nothing

static OCTAVO_ANYWHERE float times(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fmul_rn(a, b);
#else
    return a * b;
#endif
}

static OCTAVO_ANYWHERE float plus(float a, float b) {
#if defined(__CUDA_ARCH__)
    return __fadd_rn(a, b);
#else
    return a + b;
#endif
}

// What `power_of` multiplies with.
static OCTAVO_ANYWHERE float factor_of(float temperature) {
    return kLogTwoOfE / (temperature > kLeastTemperature ? temperature : kLeastTemperature);
}

// The logarithm to base two of a token's share of the highest: 0 or less. It falls, or stays, as logits fall.
static OCTAVO_ANYWHERE float power_of(float logit, float highest, float factor) {
    const float power = times(plus(logit, -highest), factor);
    return power > kLowestPower ? power : kLowestPower;
}

// A number that is not negative as a whole number, to nearest, ties to even.
static OCTAVO_ANYWHERE float to_whole(float x) {
    constexpr float kNoFraction = 8388608.0F;  // from here on floats are whole
    const float nearest = plus(plus(x, kNoFraction), -kNoFraction);
    return x < kNoFraction ? nearest : x;
}

// 2^40 2^power rounded to a whole number, to nearest, ties to even. As a float, which is exact.
static OCTAVO_ANYWHERE float weight_of_power(float power) {
    constexpr float kToWhole = 12582912.0F;  // adding it leaves no bits for a fraction
    const float whole = plus(plus(power, kToWhole), -kToWhole), x = plus(power, -whole);
    float y = 1.535336188e-4F;
    y = plus(times(y, x), 1.339887440e-3F);
    y = plus(times(y, x), 9.618437357e-3F);
    y = plus(times(y, x), 5.550332471e-2F);
    y = plus(times(y, x), 2.402264791e-1F);
    y = plus(times(y, x), 6.931472028e-1F);
    y = plus(times(y, x), 1.0F);
    const std::int32_t bits = (static_cast<std::int32_t>(whole) + kWeightBits + 127) << 23;
    float scale = 0;
    std::memcpy(&scale, &bits, sizeof scale);
    return to_whole(times(y, scale));
}

static OCTAVO_ANYWHERE std::uint64_t weight_of(float logit, float highest, float factor) {
    return static_cast<std::uint64_t>(weight_of_power(power_of(logit, highest, factor)));
}

// 53 random bits: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, 2011) of the key `seed` and the counter (branch, index,
// which, 0), as gpu_worker/sampling/philox.py draws them. `which` is 0 for the draw, and another one for each filter.
static OCTAVO_ANYWHERE std::uint64_t random_bits(std::uint64_t seed, std::uint32_t branch, std::uint32_t index,
                                                 std::uint32_t which = 0) {
    std::uint32_t x[4] = {branch, index, which, 0};
    std::uint32_t key[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
    for (int round = 0; round < 10; ++round) {
        const std::uint64_t a = std::uint64_t{0xd2511f53U} * x[0], b = std::uint64_t{0xcd9e8d57U} * x[2];
        const std::uint32_t y0 = static_cast<std::uint32_t>(b >> 32) ^ x[1] ^ key[0];
        const std::uint32_t y2 = static_cast<std::uint32_t>(a >> 32) ^ x[3] ^ key[1];
        x[1] = static_cast<std::uint32_t>(b);
        x[3] = static_cast<std::uint32_t>(a);
        x[0] = y0;
        x[2] = y2;
        key[0] += 0x9e3779b9U;
        key[1] += 0xbb67ae85U;
    }
    return (std::uint64_t{x[1]} << 32 | x[0]) >> 11;
}

// random * total / 2^53, rounded down: a place in [0, total).
static OCTAVO_ANYWHERE std::uint64_t place_of(std::uint64_t random, std::uint64_t total) {
    const std::uint64_t high = random >> 32, low = random & 0xffffffffU;
    const std::uint64_t total_high = total >> 32, total_low = total & 0xffffffffU;
    const std::uint64_t middle = high * total_low + (low * total_low >> 32), other = low * total_high;
    const std::uint64_t carry = (middle & 0xffffffffU) + (other & 0xffffffffU);
    const std::uint64_t upper = high * total_high + (middle >> 32) + (other >> 32) + (carry >> 32);
    return upper << 11 | (carry & 0xffffffffU) >> 21;
}

// The mass that the tokens kept by top-p have at least: `top_p` of `mass`, and something.
static OCTAVO_ANYWHERE std::uint64_t share_of(float top_p, std::uint64_t mass) {
    const auto share = static_cast<std::uint64_t>(static_cast<double>(top_p) * static_cast<double>(mass));
    return share > 0 ? share : 1;
}

// The least weight that min-p keeps, of at most 2^40.
static OCTAVO_ANYWHERE float least_of(float min_p) { return times(min_p, 1099511627776.0F); }

}  // namespace octavo::draw
