// The checksum by which the target of a move knows that a block has arrived whole, in parts and in any order.
//
// A block is stripes of eight words of eight bytes, the least significant byte first; the last stripe is filled up with
// zeros. Total i adds up, modulo 2^64, the products of the halves of word ^ key of its words, and the words of total i
// ^ 1 themselves, so that a word whose product is zero counts as well. The keys of stripe s are those of the seed, s
// steps on: a place has a key of its own. Sums do not depend on the order, so parts are added as they come.
//
// It is several times as fast as the sum of checksum.h, which every device computes. It finds accidents; the seed,
// which only the two workers know, makes a forgery a guess.
#pragma once

#include <cstddef>
#include <cstdint>

#include "octavo/checksum.h"

namespace octavo::part_sum {

constexpr int kTotals = 8;
constexpr std::size_t kStripeBytes = kTotals * checksum::kWordBytes;
constexpr std::uint64_t kStep = 0xd6e8feb86659fd93U;  // from the key of a stripe to that of the next; odd

struct Run {
    const char* data;
    std::size_t bytes;
};

// Adds a part, whose bytes are `runs` one after another and begin with stripe `stripe` of the block, to the totals.
// Only the part at the end of a block may end within a stripe.
void add(std::uint64_t totals[kTotals], std::uint64_t seed, std::uint64_t stripe, const Run* runs, std::size_t count);

// The checksum of a block of `bytes` bytes, all of which are in the totals.
std::uint64_t digest(const std::uint64_t totals[kTotals], std::uint64_t seed, std::uint64_t bytes);

}  // namespace octavo::part_sum
