// The body of sample_*.cpp: plain loops over arrays of fixed length, which compilers turn into vector code. Everything
// is static, so that no function compiled for AVX2 is called where there is no AVX2.
#include <cstdint>
#include <cstring>
#include <limits>

#include "octavo/draw.h"
#include "sample.h"

namespace octavo {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

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
            places[i] = static_cast<std::int32_t>(-16.0F * span.powers[i]);
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

std::int64_t next_above(const float* logits, std::int64_t begin, std::int64_t count, float least) {
    return next(logits, begin, count, [least](float logit) { return logit > least; });
}

std::int64_t next_in(const std::uint16_t* buckets, std::int64_t begin, std::int64_t count, int bucket) {
    const auto wanted = static_cast<std::uint16_t>(bucket);
    return next(buckets, begin, count, [wanted](std::uint16_t each) { return each == wanted; });
}

}  // namespace

const DrawLoops* OCTAVO_DRAW_LOOPS() {
    static constexpr DrawLoops kLoops = {sum_spans, histogram, next_above, next_in};
    return &kLoops;
}

}  // namespace octavo
