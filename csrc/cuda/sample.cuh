// The next token of each row: the highest logit, or a draw that depends on the row, its parameters and its random
// number alone.
//
// Probabilities become whole numbers (octavo/draw.h): sums are then exact, in whatever order they are made, and the
// token is that of the CPU. Filters keep a prefix of the tokens ordered by falling logit, then rising id; where it ends
// is found digit by digit, by histograms of the logits' bits. The draw is by id among what is kept.
#pragma once

#include <limits>

#include "common/numeric.cuh"
#include "common/reduce.cuh"
#include "octavo/draw.h"
#include "octavo/filters.h"

namespace octavo::cuda {

constexpr int kSampleThreads = 512;
constexpr int kSampleWarps = kSampleThreads / 32;
constexpr int kDigits = 256;
constexpr int kCopies = 8;  // of a histogram: lanes that add to one number wait for each other
constexpr int kBadLogits = -1;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

template <typename T>
struct SampleParams {
    std::int64_t* ids;          // [rows]
    const T* logits;            // [rows, vocabulary]
    const float* temperature;   // [rows]; 0: the highest
    const std::int32_t* top_k;  // [rows]; 0: off
    const float* top_p;
    const float* min_p;
    const float* filters;      // [rows, filters::kColumns]
    const std::int64_t* seed;  // [rows], as 64 bits
    const std::int64_t* branch;
    const std::int64_t* index;
    std::int64_t row_stride;
    int vocabulary;
};

struct SampleShared {
    std::uint32_t low[kDigits][kCopies];  // words of mass: shared memory adds 32 bits, and would loop for 64
    std::uint32_t high[kDigits][kCopies];
    std::uint32_t some[kDigits][kCopies];
    unsigned long long mass[kDigits];  // of all copies
    unsigned long long count[kDigits];
    unsigned long long space[kSampleWarps];
    unsigned long long before[kSampleWarps];  // of earlier warps' ids
    unsigned long long equals[kSampleWarps];
    unsigned long long result[3];
};

// A row's logits, and how much each weighs.
template <typename T>
struct SampleRow {
    const T* logits;
    int vocabulary;
    float highest, factor;
    float least;         // what weighs less weighs nothing
    filters::Band band;  // what has another power weighs nothing

    __device__ __forceinline__ float logit(int id) const { return to_float(logits[id]); }
    __device__ __forceinline__ float power(float logit) const { return draw::power_of(logit, highest, factor); }
    __device__ __forceinline__ std::uint64_t weight(float logit) const {
        const float all = draw::weight_of_power(power(logit));
        return all >= least && band.has(power(logit)) ? static_cast<std::uint64_t>(all) : 0;
    }
};

// Keys are ordered as logits are, and equal where they are; none is 0.
__device__ __forceinline__ std::uint32_t key_of(float logit) {
    const std::uint32_t bits = logit == 0.0F ? 0 : bits_of(logit);
    return bits >> 31 != 0 ? ~bits : bits | 0x80000000U;
}
__device__ __forceinline__ float logit_of(std::uint32_t key) {
    return float_of(key >> 31 != 0 ? key & 0x7fffffffU : ~key);
}

// Which tokens are kept, and what they weigh: key > least, or equal to it and among the first `equal` of those by id.
struct Kept {
    std::uint32_t least;
    std::uint64_t equal, mass;
};

// Adds a token to a histogram, for cut_prefix.
__device__ __forceinline__ void add_token(SampleShared& s, std::uint32_t digit, std::uint64_t weight, bool counted) {
    const auto copy = threadIdx.x % kCopies;
    const auto low = static_cast<std::uint32_t>(weight);
    const std::uint32_t before = atomicAdd(&s.low[digit][copy], low);
    const std::uint32_t high = static_cast<std::uint32_t>(weight >> 32) + (before + low < before ? 1U : 0U);
    if (high != 0) {
        atomicAdd(&s.high[digit][copy], high);
    }
    if (counted) {
        atomicAdd(&s.some[digit][copy], 1U);
    }
}

// Where, in falling order of digits, `target` of the tokens (or of their mass) is reached, with `above` and
// `above_mass` before the first digit: s.result becomes the digit (0 if nowhere), and what count and mass are before
// it. One warp calls this: each lane has eight digits.
__device__ __forceinline__ void find_digit(bool by_mass, std::uint64_t target, std::uint64_t above,
                                           std::uint64_t above_mass, SampleShared& s) {
    constexpr int kEach = kDigits / 32;
    const int lane = static_cast<int>(threadIdx.x), first = kDigits - 1 - kEach * lane;
    unsigned long long count = 0, mass = 0;
    for (int i = 0; i < kEach; ++i) {
        count += s.count[first - i];
        mass += s.mass[first - i];
    }
    unsigned long long counts = count, masses = mass;  // with those of the lanes before
    for (int by = 1; by < 32; by *= 2) {
        const unsigned long long other_count = __shfl_up_sync(kAllLanes, counts, by);
        const unsigned long long other_mass = __shfl_up_sync(kAllLanes, masses, by);
        counts += lane >= by ? other_count : 0;
        masses += lane >= by ? other_mass : 0;
    }
    counts += above;
    masses += above_mass;
    const unsigned reached = __ballot_sync(kAllLanes, (by_mass ? masses : counts) >= target);
    if (lane != min(__popc((reached & (0U - reached)) - 1), 31)) {  // the lowest, or the last if there is none
        return;
    }
    counts -= count;
    masses -= mass;
    int digit = first;
    for (; digit > max(first - kEach + 1, 0); --digit) {
        if ((by_mass ? masses + s.mass[digit] : counts + s.count[digit]) >= target) {
            break;
        }
        counts += s.count[digit];
        masses += s.mass[digit];
    }
    s.result[0] = static_cast<unsigned long long>(digit);
    s.result[1] = counts;
    s.result[2] = masses;
}

// The shortest prefix of all tokens that has `target` of them (or of their mass), or `kept` if fewer weigh anything.
// Every thread gets it.
template <typename T>
__device__ Kept cut_prefix(const SampleRow<T>& row, const Kept& kept, bool by_mass, std::uint64_t target,
                           SampleShared& s) {
    const int thread = static_cast<int>(threadIdx.x);
    std::uint32_t prefix = 0;
    std::uint64_t above = 0, above_mass = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int i = thread; i < kDigits * kCopies; i += kSampleThreads) {
            s.low[i / kCopies][i % kCopies] = 0;
            s.high[i / kCopies][i % kCopies] = 0;
            s.some[i / kCopies][i % kCopies] = 0;
        }
        __syncthreads();
        for (int i = thread; i < row.vocabulary; i += kSampleThreads) {
            const float logit = row.logit(i);
            const std::uint64_t key = key_of(logit);
            if (key >> (shift + 8) == prefix) {
                const std::uint64_t weight = row.weight(logit);
                if (weight > 0) {
                    add_token(s, static_cast<std::uint32_t>(key >> shift & 255), weight, !by_mass);
                }
            }
        }
        __syncthreads();
        for (int i = thread; i < kDigits; i += kSampleThreads) {
            unsigned long long mass = 0, count = 0;
            for (int copy = 0; copy < kCopies; ++copy) {
                mass += static_cast<unsigned long long>(s.high[i][copy]) << 32;
                mass += s.low[i][copy];
                count += s.some[i][copy];
            }
            s.mass[i] = mass;
            s.count[i] = count;
        }
        __syncthreads();
        if (thread < 32) {
            find_digit(by_mass, target, above, above_mass, s);
        }
        __syncthreads();
        prefix = prefix << 8 | static_cast<std::uint32_t>(s.result[0]);
        above = s.result[1];
        above_mass = s.result[2];
        __syncthreads();
    }
    if (prefix == 0) {
        return kept;
    }
    const std::uint64_t weight = row.weight(logit_of(prefix));
    const std::uint64_t equal = by_mass ? (target - above_mass + weight - 1) / weight : target - above;
    return {prefix, equal, above_mass + equal * weight};
}

// The id at place `target` of the kept mass, counted in order of ids. Warps have neighbouring ids each.
template <typename T>
__device__ int draw_by_id(const SampleRow<T>& row, const Kept& kept, std::uint64_t random, SampleShared& s) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int span = (row.vocabulary + kSampleThreads - 1) / kSampleThreads * 32;
    const int begin = min(warp * span, row.vocabulary), end = min(begin + span, row.vocabulary);
    unsigned long long mass = 0, equals = 0;
    for (int i = begin + lane; i < end; i += 32) {
        const float logit = row.logit(i);
        const std::uint32_t key = key_of(logit);
        mass += key > kept.least ? row.weight(logit) : 0;
        equals += key == kept.least ? 1 : 0;
    }
    s.before[warp] = reduce_warp(mass, Add{});
    s.equals[warp] = reduce_warp(equals, Add{});
    __syncthreads();
    if (threadIdx.x == 0) {
        const std::uint64_t weight = kept.equal > 0 ? row.weight(logit_of(kept.least)) : 0;  // of each equal
        unsigned long long left = kept.equal, total = 0;
        for (int i = 0; i < kSampleWarps; ++i) {  // what of each warp is kept, then where each begins
            const unsigned long long some = s.equals[i] < left ? s.equals[i] : left;
            s.equals[i] = some;
            left -= some;
            const unsigned long long here = s.before[i] + some * weight;
            s.before[i] = total;
            total += here;
        }
        s.result[0] = draw::place_of(random, total);
        s.result[1] = static_cast<unsigned long long>(kBadLogits);
        s.result[2] = total;
    }
    __syncthreads();
    const unsigned long long target = s.result[0];
    const unsigned long long next = warp + 1 < kSampleWarps ? s.before[warp + 1] : s.result[2];
    if (target >= s.before[warp] && target < next) {  // all lanes of one warp
        unsigned long long at = s.before[warp], left = s.equals[warp];
        for (int start = begin; start < end; start += 32) {
            const int i = start + lane;
            const float logit = i < end ? row.logit(i) : kLowest;
            const std::uint32_t key = key_of(logit);
            const unsigned equal = __ballot_sync(kAllLanes, i < end && key == kept.least);
            const auto rank = static_cast<unsigned long long>(__popc(equal & ((1U << lane) - 1)));
            const bool stays = key > kept.least || (key == kept.least && rank < left);
            const std::uint64_t weight = stays ? row.weight(logit) : 0;
            unsigned long long sum = weight;
            for (int by = 1; by < 32; by *= 2) {
                const unsigned long long other = __shfl_up_sync(kAllLanes, sum, by);
                sum += lane >= by ? other : 0;
            }
            if (target >= at + sum - weight && target < at + sum) {
                s.result[1] = static_cast<unsigned long long>(i);
            }
            at += __shfl_sync(kAllLanes, sum, 31);
            const auto found = static_cast<unsigned long long>(__popc(equal));
            left -= found < left ? found : left;
        }
    }
    __syncthreads();
    return static_cast<int>(s.result[1]);
}

// Of all tokens. Every thread gets it.
template <typename T>
__device__ std::uint64_t mass_of(const SampleRow<T>& row, SampleShared& s) {
    unsigned long long total = 0;
    for (int i = static_cast<int>(threadIdx.x); i < row.vocabulary; i += kSampleThreads) {
        total += row.weight(row.logit(i));
    }
    return reduce_block(total, s.space, Add{});
}

// The kept tokens of a row, as filters see them. All threads of the block call each function, and get its result.
template <typename T>
struct FilteredTokens {
    SampleRow<T>& row;
    const Kept& kept;
    SampleShared& s;

    template <typename Amount, typename Combine>
    __device__ std::uint64_t over_all(Amount amount, bool each_equal, Combine combine) const {
        unsigned long long found = 0;
        for (int i = static_cast<int>(threadIdx.x); i < row.vocabulary; i += kSampleThreads) {
            const float logit = row.logit(i);
            if (key_of(logit) > kept.least) {
                found = combine(found, amount_of(logit, amount));
            }
        }
        if (threadIdx.x == 0 && kept.equal > 0) {
            const unsigned long long one = amount_of(logit_of(kept.least), amount);
            found = combine(found, each_equal ? kept.equal * one : one);
        }
        return reduce_block(found, s.space, combine);
    }
    template <typename Amount>
    __device__ unsigned long long amount_of(float logit, Amount amount) const {
        return amount(row.power(logit), static_cast<float>(row.weight(logit)));
    }
    template <typename Amount>
    __device__ std::uint64_t sum(Amount amount) const {
        return over_all(amount, true, Add{});
    }
    template <typename Amount>
    __device__ std::uint64_t largest(Amount amount) const {
        return over_all(amount, false, Larger{});
    }
    __device__ void narrow(const filters::Band& band) {
        row.band.low = band.low > row.band.low ? band.low : row.band.low;
        row.band.high = band.high < row.band.high ? band.high : row.band.high;
    }
};

// A block per row.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads) sample_kernel(const SampleParams<T> p) {
    SampleShared& s = *reinterpret_cast<SampleShared*>(shared_memory());
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t row = blockIdx.x;
    const T* logits = p.logits + row * p.row_stride;
    float top = kLowest;
    int best = p.vocabulary;
    unsigned long long bad = 0;
    for (int i = thread; i < p.vocabulary; i += kSampleThreads) {
        const float x = to_float(logits[i]);
        bad += x != x || x == -kLowest ? 1 : 0;
        if (x > top) {
            top = x;
            best = i;
        }
    }
    const float highest = reduce_block(top, reinterpret_cast<float*>(s.space), Larger{});
    const int candidate = top == highest ? best : p.vocabulary;
    const int lowest_id = -reduce_block(-candidate, reinterpret_cast<int*>(s.space), Larger{});
    bad = reduce_block(bad, s.space, Add{});
    if (bad > 0 || highest == kLowest || p.temperature[row] <= 0.0F) {
        if (thread == 0) {
            p.ids[row] = bad > 0 || highest == kLowest ? kBadLogits : lowest_id;
        }
        return;
    }
    SampleRow<T> weighed{logits, p.vocabulary, highest, draw::factor_of(p.temperature[row]), 0.0F, {kLowest, 0.0F}};
    Kept kept{0, 0, 0};
    const int top_k = p.top_k[row];
    if (top_k > 0 && top_k < p.vocabulary) {
        kept = cut_prefix(weighed, kept, false, static_cast<std::uint64_t>(top_k), s);
    }
    if (p.top_p[row] < 1.0F) {
        if (kept.least == 0) {
            kept.mass = mass_of(weighed, s);
        }
        kept = cut_prefix(weighed, kept, true, draw::share_of(p.top_p[row], kept.mass), s);
    }
    weighed.least = draw::least_of(p.min_p[row]);
    const filters::Chance chance{static_cast<std::uint64_t>(p.seed[row]), static_cast<std::uint32_t>(p.branch[row]),
                                 static_cast<std::uint32_t>(p.index[row])};
    FilteredTokens<T> tokens{weighed, kept, s};
    filters::apply(tokens, p.filters + row * filters::kColumns, chance);
    const int id = draw_by_id(weighed, kept, chance.bits(0), s);
    if (thread == 0) {
        p.ids[row] = id;
    }
}

}  // namespace octavo::cuda
