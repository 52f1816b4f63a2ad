// The further filters of a draw: what top-k, top-p and min-p keep, they narrow down, one after another, in this order.
//
// A filter is a function of a row's tokens and of the row's parameters. It says which powers (draw.h) are kept. It sees
// the tokens by sums and maxima of whole numbers alone, which do not depend on their order: so each caller has its own
// loops, on a CPU or over a block of a GPU, and all keep the same tokens, as gpu_worker/sampling/filters.py does. A
// caller's `Tokens` has
//
//     sum(amount), largest(amount)    // of amount(power, weight), an std::uint64_t, over the tokens that are kept so
//     far
#pragma once

#include "octavo/draw.h"

#if defined(__CUDACC__)
#define OCTAVO_FILTER __device__ __forceinline__
#else
#define OCTAVO_FILTER inline
#endif

namespace octavo::filters {

// The columns of a row's parameters, in the order of the table in octavo/request/sampling.py.
enum Column { kTypicalP, kXtcThreshold, kXtcProbability, kColumns };
static constexpr float kOff[] = {1.0F, 0.1F, 0.0F};  // with these parameters nothing is left out

// What is kept: the powers from `low` to `high`.
struct Band {
    float low, high;
    OCTAVO_FILTER bool has(float power) const { return power >= low && power <= high; }
};

// Where the random numbers of a filter come from. `which` is 0 for the draw itself, and another one for each filter.
struct Chance {
    std::uint64_t seed;
    std::uint32_t branch, index;
    OCTAVO_FILTER std::uint64_t bits(std::uint32_t which) const {
        return draw::random_bits(seed, branch, index, which);
    }
};

// Floats of 0 and more are ordered as their bits are.
static OCTAVO_FILTER std::uint32_t bits_of_size(float size) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &size, sizeof bits);
    return bits & 0x7fffffffU;
}
static OCTAVO_FILTER float size_of_bits(std::uint32_t bits) {
    float size = 0;
    std::memcpy(&size, &bits, sizeof size);
    return size;
}
static OCTAVO_FILTER std::uint64_t whole_of(float weight) { return static_cast<std::uint64_t>(weight); }

// Locally typical sampling (Meister et al., 2022): keeps the tokens whose surprise is nearest to the expected one, as
// many as have `share` of the mass; of equally near ones all. Surprise is -power but for a constant.
template <typename Tokens>
OCTAVO_FILTER Band typical(const Tokens& tokens, float share) {
    const std::uint64_t mass = tokens.sum([](float, float weight) { return whole_of(weight); });
    const std::uint64_t moment =
        tokens.sum([](float power, float weight) { return whole_of(draw::to_whole(draw::times(weight, -power))); });
    const auto expected = static_cast<float>(static_cast<double>(moment) / static_cast<double>(mass));
    const std::uint64_t target = draw::share_of(share, mass);
    std::uint32_t reach = 0;  // the largest distance such that what is nearer does not come to the target
    for (std::uint32_t bit = 1U << 30; bit > 0; bit >>= 1) {
        const std::uint32_t tried = reach | bit;
        const std::uint64_t nearer = tokens.sum([expected, tried](float power, float weight) {
            return bits_of_size(draw::plus(-power, -expected)) < tried ? whole_of(weight) : 0;
        });
        reach = nearer < target ? tried : reach;
    }
    const auto within = [expected, reach](float power, float weight) {
        return weight > 0 && bits_of_size(draw::plus(-power, -expected)) <= reach;
    };
    const std::uint64_t lowest = tokens.largest(
        [within](float power, float weight) { return within(power, weight) ? std::uint64_t{bits_of_size(power)} : 0; });
    const std::uint64_t highest = tokens.largest([within](float power, float weight) {
        return within(power, weight) ? std::uint64_t{~bits_of_size(power)} : 0;
    });
    return {-size_of_bits(static_cast<std::uint32_t>(lowest)), -size_of_bits(~static_cast<std::uint32_t>(highest))};
}

// Exclude Top Choices (p-e-w, 2024): of the tokens with at least `threshold` of the mass, keeps the least likely alone,
// and those that are as likely as it.
template <typename Tokens>
OCTAVO_FILTER Band without_top_choices(const Tokens& tokens, float threshold) {
    const std::uint64_t mass = tokens.sum([](float, float weight) { return whole_of(weight); });
    const double least = static_cast<double>(threshold) * static_cast<double>(mass);
    const std::uint64_t lowest = tokens.largest([least](float power, float weight) {
        return weight > 0 && static_cast<double>(weight) >= least ? std::uint64_t{bits_of_size(power)} : 0;
    });
    return {draw::kLowestPower, -size_of_bits(static_cast<std::uint32_t>(lowest))};
}

static OCTAVO_FILTER bool any(const float* columns) {
    bool found = false;
    for (int i = 0; i < kColumns; ++i) {
        found |= columns[i] != kOff[i];
    }
    return found;
}

// `narrow(band)`: keeps what the band has, so that the next filter sees it alone.
template <typename Tokens>
OCTAVO_FILTER void apply(Tokens& tokens, const float* columns, const Chance& chance) {
    if (columns[kTypicalP] < 1) {
        tokens.narrow(typical(tokens, columns[kTypicalP]));
    }
    if (static_cast<double>(chance.bits(1)) < static_cast<double>(columns[kXtcProbability]) * 0x1p53) {
        tokens.narrow(without_top_choices(tokens, columns[kXtcThreshold]));
    }
}

}  // namespace octavo::filters
