// The checksum of a block's bytes, which is equal on every device: the sum, modulo 2^64, of `mixed` of its words.
//
// A layer's bytes are words of eight, the least significant byte first; the last is filled up with zeros. Places count
// the words of all layers of the block. A sum does not depend on the order, so threads can share the work in any way.
#pragma once

#include <cstdint>

#include "octavo/anywhere.h"

namespace octavo::checksum {

constexpr std::int64_t kWordBytes = 8;

static OCTAVO_ANYWHERE std::int64_t words_of(std::int64_t bytes) { return (bytes + kWordBytes - 1) / kWordBytes; }

// splitmix64 (Steele, Lea, Flood, 2014): its generator's state at `place`, moved by the word, and its finalizer.
static OCTAVO_ANYWHERE std::uint64_t mixed(std::uint64_t word, std::int64_t place) {
    std::uint64_t x = word + static_cast<std::uint64_t>(place + 1) * 0x9e3779b97f4a7c15U;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9U;
    x = (x ^ x >> 27) * 0x94d049bb133111ebU;
    return x ^ x >> 31;
}

}  // namespace octavo::checksum
