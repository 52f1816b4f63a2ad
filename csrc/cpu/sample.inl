// The body of sample_*.cpp: plain loops over arrays of fixed length, which compilers turn into vector code. Everything
// is static, so that no function compiled for AVX2 is called where there is no AVX2.
#ifdef __AVX2__
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#include "octavo/draw.h"
#include "sample.h"

namespace octavo {
namespace {

struct Span {
    float logits[kSpan], powers[kSpan], weights[kSpan];
};

// The tokens from `begin` on; beyond the row's end are some that weigh nothing. Returns how many there are.
std::int64_t weigh(const DrawRow& row, std::int64_t begin, Span& span) {
    const std::int64_t some = row.count - begin < kSpan ? row.count - begin : kSpan;
    std::memcpy(span.logits, row.logits + begin, static_cast<std::size_t>(some) * sizeof(float));
    for (std::int64_t i = some; i < kSpan; ++i) {
        span.logits[i] = kNever;
    }
    for (std::int64_t i = 0; i < kSpan; ++i) {
        span.powers[i] = draw::power_of(span.logits[i], row.highest, row.factor);
        span.weights[i] = draw::weight_of_power(span.powers[i]);
    }
    return some;
}

// Exact, as all of it is whole and at most 2^48.
std::uint64_t sum_of(const float* weights) {
    double sums[8] = {};
    for (std::int64_t i = 0; i < kSpan; i += 8) {
        for (std::int64_t j = 0; j < 8; ++j) {
            sums[j] += static_cast<double>(weights[i + j]);
        }
    }
    return static_cast<std::uint64_t>(((sums[0] + sums[1]) + (sums[2] + sums[3])) +
                                      ((sums[4] + sums[5]) + (sums[6] + sums[7])));
}

std::uint64_t sum_spans(const DrawRow& row, const Kept& kept, std::uint64_t* sums) {
    Span span;
    std::uint64_t total = 0;
    for (std::int64_t begin = 0; begin < row.count; begin += kSpan) {
        weigh(row, begin, span);
        const std::int64_t last = kept.id - begin;
        const auto place = static_cast<std::int32_t>(last < -1 ? -1 : last > kSpan ? kSpan : last);
        for (std::int32_t i = 0; i < kSpan; ++i) {
            const bool first = (span.logits[i] > kept.logit) | ((span.logits[i] == kept.logit) & (i <= place));
            span.weights[i] = first & (span.weights[i] >= kept.least) ? span.weights[i] : 0.0F;
        }
        const std::uint64_t sum = sum_of(span.weights);
        sums[begin / kSpan] = sum;
        total += sum;
    }
    return total;
}

std::uint64_t histogram(const DrawRow& row, int num, std::uint16_t* buckets, std::int32_t* counts,
                        std::uint64_t* masses) {
    constexpr std::int64_t kSome = 16;
    Span span;
    std::int32_t places[kSpan];
    std::uint64_t total = 0;
    std::memset(counts, 0, static_cast<std::size_t>(num) * sizeof *counts);
    std::memset(masses, 0, static_cast<std::size_t>(num) * sizeof *masses);
    for (std::int64_t begin = 0; begin < row.count; begin += kSpan) {
        const std::int64_t some = weigh(row, begin, span);
        std::uint16_t narrow[kSpan];
        for (std::int64_t i = 0; i < kSpan; ++i) {
            places[i] = bucket_of(span.powers[i]);
            narrow[i] = static_cast<std::uint16_t>(places[i]);
        }
        std::memcpy(buckets + begin, narrow, static_cast<std::size_t>(some) * sizeof *narrow);
        for (std::int64_t first = 0; first < kSpan; first += kSome) {
            std::int32_t any = 0;
            for (std::int64_t i = 0; i < kSome; ++i) {
                any |= places[first + i] < num ? 1 : 0;
            }
            for (std::int64_t i = first; any != 0 && i < first + kSome; ++i) {
                if (places[i] < num) {
                    ++counts[places[i]];
                    masses[places[i]] += static_cast<std::uint64_t>(static_cast<std::int64_t>(span.weights[i]));
                }
            }
        }
        total += sum_of(span.weights);
    }
    return total;
}

template <typename T, typename Test>
std::int64_t next(const T* row, std::int64_t begin, std::int64_t count, Test test) {
    std::int64_t i = begin;
    for (; i + 32 <= count; i += 32) {
        std::int32_t any = 0;
        for (std::int64_t j = 0; j < 32; ++j) {
            any |= test(row[i + j]) ? 1 : 0;
        }
        if (any != 0) {
            break;
        }
    }
    while (i < count && !test(row[i])) {
        ++i;
    }
    return i;
}

// Unlike an argmax of kernels.h, as fast where logits are -inf.
std::int64_t best(const float* logits, std::int64_t count) {
    constexpr std::int64_t kLanes = 32;
    float tops[kLanes];
    std::int32_t odd[kLanes] = {};
    for (float& top : tops) {
        top = kNever;
    }
    std::int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        for (std::int64_t j = 0; j < kLanes; ++j) {
            const float logit = logits[i + j];
            tops[j] = logit > tops[j] ? logit : tops[j];
            odd[j] |= logit != logit ? 1 : 0;
        }
    }
    float top = kNever;
    std::int32_t any = 0;
    for (; i < count; ++i) {
        top = logits[i] > top ? logits[i] : top;
        any |= logits[i] != logits[i] ? 1 : 0;
    }
    for (std::int64_t j = 0; j < kLanes; ++j) {
        top = tops[j] > top ? tops[j] : top;
        any |= odd[j];
    }
    return any != 0 ? next(logits, 0, count, [](float logit) { return logit != logit; })
                    : next(logits, 0, count, [top](float logit) { return logit == top; });
}

std::int64_t next_above(const float* logits, std::int64_t begin, std::int64_t count, float least) {
    return next(logits, begin, count, [least](float logit) { return logit > least; });
}

std::int64_t next_within(const float* logits, std::int64_t begin, std::int64_t count, float low, float high) {
    return next(logits, begin, count, [low, high](float logit) { return (logit >= low) & (logit <= high); });
}

std::int64_t next_in(const std::uint16_t* buckets, std::int64_t begin, std::int64_t count, int bucket) {
    const auto wanted = static_cast<std::uint16_t>(bucket);
    return next(buckets, begin, count, [wanted](std::uint16_t each) { return each == wanted; });
}

// Of some logits those that have a bit, without a branch that no processor could foresee.
float* leave_each(const float* from, std::uint32_t word, float* end) {
    for (; word != 0; word >>= 1) {
        *end = *from++;
        end += word & 1;
    }
    return end;
}

#if defined(__AVX512F__)
float* leave_word(const float* from, std::uint32_t word, float* end) {
    for (int half = 0; half < 2; ++half, from += 16, word >>= 16) {
        const auto bits = static_cast<std::uint16_t>(word);
        _mm512_storeu_ps(end, _mm512_maskz_compress_ps(bits, _mm512_loadu_ps(from)));
        end += __builtin_popcount(bits);
    }
    return end;
}
#elif defined(__AVX2__)
// For each byte the places of its bits, one after another.
struct Places {
    constexpr Places() : of() {
        for (int byte = 0; byte < 256; ++byte) {
            for (int bit = 0, num = 0; bit < 8; ++bit) {
                if ((byte >> bit & 1) != 0) {
                    of[byte][num++] = static_cast<std::uint8_t>(bit);
                }
            }
        }
    }

    alignas(8) std::uint8_t of[256][8];
};

float* leave_word(const float* from, std::uint32_t word, float* end) {
    static constexpr Places kPlaces;
    for (int some = 0; some < 4; ++some, from += 8, word >>= 8) {
        const auto bits = static_cast<std::uint8_t>(word);
        const __m128i places = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPlaces.of[bits]));
        _mm256_storeu_ps(end, _mm256_permutevar8x32_ps(_mm256_loadu_ps(from), _mm256_cvtepu8_epi32(places)));
        end += __builtin_popcount(bits);
    }
    return end;
}
#else
float* leave_word(const float* from, std::uint32_t word, float* end) {
    const int num = __builtin_popcount(word);
    if (num >= 8 && num <= 28) {
        return leave_each(from, word, end);
    }
    while (word != 0) {  // run by run
        const int gap = __builtin_ctz(word);
        const int run = word == ~0U ? 32 : __builtin_ctz(~(word >> gap));
        std::memcpy(end, from + gap, static_cast<std::size_t>(run) * sizeof *end);
        end += run;
        from += gap + run;
        word = gap + run < 32 ? word >> (gap + run) : 0;
    }
    return end;
}
#endif

std::int64_t leave(const float* x, std::int64_t count, const std::int32_t* mask, float* left) {
    float* end = left;
    std::int64_t begin = 0;
    for (; begin + 32 <= count; begin += 32) {
        const auto word = static_cast<std::uint32_t>(mask[begin / 32]);
        if (word != 0) {
            end = leave_word(x + begin, word, end);
        }
    }
    if (begin < count) {
        end = leave_each(x + begin, static_cast<std::uint32_t>(mask[begin / 32]) & ~(~0U << (count - begin)), end);
    }
    return end - left;
}

}  // namespace

const DrawLoops* OCTAVO_DRAW_LOOPS() {
    static constexpr DrawLoops kLoops = {sum_spans, histogram, best, next_above, next_within, next_in, leave};
    return &kLoops;
}

}  // namespace octavo
