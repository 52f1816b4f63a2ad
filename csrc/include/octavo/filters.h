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
enum Column { kColumns };
static constexpr float kOff[kColumns + 1] = {};  // with these parameters nothing is left out

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
    static_cast<void>(tokens), static_cast<void>(columns), static_cast<void>(chance);
}

}  // namespace octavo::filters
