// The loops of a draw over a row of logits, compiled for every x86-64 processor, for AVX2 and for AVX-512, without FMA
// (draw.h).
#pragma once

#include <cstdint>
#include <limits>

namespace octavo {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int kMaskBits = 32;        // of a word of a mask
constexpr std::int64_t kSpan = 256;  // tokens whose weights are summed as one
constexpr int kBuckets = 41 * 16;  // of tokens by power: sixteen to a power of two, the likeliest first; later ones are
                                   // all alike, as nothing there weighs anything
constexpr int kNearBuckets = 16 * 16;  // where filters mostly cut

static inline std::int32_t bucket_of(float power) { return static_cast<std::int32_t>(-16.0F * power); }

// What is common to a row's tokens.
struct DrawRow {
    const float* logits;
    std::int64_t count;
    float highest, factor;
};

// A token is kept if its weight is at least `least`, and its logit above `logit`, or the same and its id at most `id`.
struct Kept {
    float logit;
    std::int64_t id;
    float least;
};

constexpr std::int64_t kSpare = 16;  // floats behind what `leave` keeps

struct DrawLoops {
    // sums[i]: of the weights of those kept in span i. Returns the sum of all.
    std::uint64_t (*sum_spans)(const DrawRow& row, const Kept& kept, std::uint64_t* sums);
    // buckets[i]: of token i; counts and masses [num]: of the tokens of the first `num` buckets. Returns the mass of
    // all.
    std::uint64_t (*histogram)(const DrawRow& row, int num, std::uint16_t* buckets, std::int32_t* counts,
                               std::uint64_t* masses);
    // The first id of the highest logit; of the first NaN, if there is one.
    std::int64_t (*best)(const float* logits, std::int64_t count);
    // The first id from `begin` on whose logit is above `least`, or count.
    std::int64_t (*next_above)(const float* logits, std::int64_t begin, std::int64_t count, float least);
    // The first id from `begin` on whose logit is from `low` to `high`, or count.
    std::int64_t (*next_within)(const float* logits, std::int64_t begin, std::int64_t count, float low, float high);
    // The first id from `begin` on that is in `bucket`, or count.
    std::int64_t (*next_in)(const std::uint16_t* buckets, std::int64_t begin, std::int64_t count, int bucket);
    // Writes those of x [count] that have a bit in the mask one beside the other. `left` has room for count + kSpare.
    // Returns how many they are.
    std::int64_t (*leave)(const float* x, std::int64_t count, const std::int32_t* mask, float* left);
};

const DrawLoops* generic_draw_loops();
const DrawLoops* avx2_draw_loops();  // these are compiled for x86 alone
const DrawLoops* avx512_draw_loops();

}  // namespace octavo
