#include "octavo/part_sum.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace octavo::part_sum {
namespace {

struct Sums {
    std::uint64_t totals[kTotals];
    std::uint64_t keys[kTotals];  // of the next stripe
};

#if defined(__SSE2__)  // every x86-64 has it, so there is no choice at run time

void add_stripes(Sums& sums, const char* data, std::size_t count) {
    constexpr int kPairs = kTotals / 2;
    __m128i totals[kPairs], keys[kPairs];
    std::memcpy(totals, sums.totals, sizeof totals);
    std::memcpy(keys, sums.keys, sizeof keys);
    const __m128i step = _mm_set1_epi64x(static_cast<std::int64_t>(kStep));
    for (; count > 0; --count, data += kStripeBytes) {
        for (int i = 0; i < kPairs; ++i) {
            __m128i words;
            std::memcpy(&words, data + i * 16, sizeof words);
            const __m128i mixed = _mm_xor_si128(words, keys[i]);
            const __m128i product = _mm_mul_epu32(mixed, _mm_srli_epi64(mixed, 32));
            const __m128i turned = _mm_shuffle_epi32(words, _MM_SHUFFLE(1, 0, 3, 2));
            totals[i] = _mm_add_epi64(totals[i], _mm_add_epi64(product, turned));
            keys[i] = _mm_add_epi64(keys[i], step);
        }
    }
    std::memcpy(sums.totals, totals, sizeof totals);
    std::memcpy(sums.keys, keys, sizeof keys);
}

#else

void add_stripes(Sums& sums, const char* data, std::size_t count) {
    for (; count > 0; --count, data += kStripeBytes) {
        std::uint64_t words[kTotals];
        std::memcpy(words, data, sizeof words);
        for (int i = 0; i < kTotals; ++i) {
            const std::uint64_t mixed = words[i] ^ sums.keys[i];
            sums.totals[i] += (mixed & 0xffffffffU) * (mixed >> 32) + words[i ^ 1];
            sums.keys[i] += kStep;
        }
    }
}

#endif

}  // namespace

void add(std::uint64_t totals[kTotals], std::uint64_t seed, std::uint64_t stripe, const Run* runs, std::size_t count) {
    Sums sums;
    std::memcpy(sums.totals, totals, sizeof sums.totals);
    for (int i = 0; i < kTotals; ++i) {
        sums.keys[i] = checksum::mixed(seed, i) + stripe * kStep;
    }
    char held[kStripeBytes];  // the beginning of a stripe whose rest is in the next run
    std::size_t filled = 0;
    for (std::size_t run = 0; run < count; ++run) {
        const char* data = runs[run].data;
        std::size_t bytes = runs[run].bytes;
        if (filled > 0) {
            const std::size_t some = std::min(bytes, kStripeBytes - filled);
            std::copy_n(data, some, held + filled);
            data += some, bytes -= some, filled += some;
            if (filled < kStripeBytes) {
                continue;
            }
            add_stripes(sums, held, 1);
        }
        add_stripes(sums, data, bytes / kStripeBytes);
        filled = bytes % kStripeBytes;
        std::copy_n(data + bytes - filled, filled, held);
    }
    if (filled > 0) {
        std::fill(held + filled, held + kStripeBytes, '\0');
        add_stripes(sums, held, 1);
    }
    std::memcpy(totals, sums.totals, sizeof sums.totals);
}

std::uint64_t digest(const std::uint64_t totals[kTotals], std::uint64_t seed, std::uint64_t bytes) {
    std::uint64_t sum = checksum::mixed(seed ^ bytes, kTotals);
    for (int i = 0; i < kTotals; ++i) {
        sum = checksum::mixed(sum ^ totals[i], i);
    }
    return sum;
}

}  // namespace octavo::part_sum
