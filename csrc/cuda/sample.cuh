// The next token of each row: the highest logit, or a draw that depends on the row, its parameters and its random
// number alone.
//
// Probabilities become whole numbers, 2^40 for the likeliest token: sums are then exact, in whatever order they are
// made. Filters keep a prefix of the tokens ordered by falling weight, then rising id; where it ends is found
// digit by digit, by histograms of the weights' bits. The draw is by id among what is kept.
#pragma once

#include <limits>

#include "common/numeric.cuh"
#include "common/reduce.cuh"

namespace octavo::cuda {

constexpr int kSampleThreads = 512;
constexpr int kSampleWarps = kSampleThreads / 32;
constexpr int kDigits = 256;
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
    const std::int64_t* seed;  // [rows], as 64 bits
    const std::int64_t* branch;
    const std::int64_t* index;
    std::int64_t row_stride;
    int vocabulary;
};

// 53 random bits: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, 2011), as gpu_worker/philox.py draws them.
__device__ __forceinline__ std::uint64_t random_bits(std::uint64_t seed, std::uint32_t branch, std::uint32_t index) {
    std::uint32_t x[4] = {branch, index, 0, 0};
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

struct SampleShared {
    unsigned long long mass[kDigits];
    unsigned long long count[kDigits];
    unsigned long long space[kSampleWarps];
    unsigned long long before[kSampleWarps];  // of earlier warps' ids
    unsigned long long equals[kSampleWarps];
    unsigned long long result[3];
};

// A token's weight as a whole number: 2^40 2^((logit - top) log2(e) / temperature).
__device__ __forceinline__ std::uint64_t weight_of_logit(float logit, float top, float factor) {
    return static_cast<std::uint64_t>(exp2f((logit - top) * factor) * 1099511627776.0F);
}

// Which tokens are kept: weight > least, or equal to it and among the first `equal` of those by id.
struct Kept {
    std::uint64_t least, equal, mass;
};

// The shortest prefix of (weight, id) order within `kept` that has `target` tokens (or mass). Every thread gets it.
template <typename T>
__device__ Kept cut_prefix(const SampleParams<T>& p, const T* logits, float top, float factor, Kept kept, bool by_mass,
                           std::uint64_t target, SampleShared& s) {
    const int thread = static_cast<int>(threadIdx.x);
    std::uint64_t prefix = 0, above = 0, above_mass = 0;
    for (int shift = 40; shift >= 0; shift -= 8) {  // weights have 41 bits
        for (int i = thread; i < kDigits; i += kSampleThreads) {
            s.mass[i] = 0;
            s.count[i] = 0;
        }
        __syncthreads();
        for (int i = thread; i < p.vocabulary; i += kSampleThreads) {
            const std::uint64_t weight = weight_of_logit(to_float(logits[i]), top, factor);
            if (weight >> (shift + 8) == prefix && weight > 0) {
                atomicAdd(&s.mass[weight >> shift & 255], static_cast<unsigned long long>(weight));
                atomicAdd(&s.count[weight >> shift & 255], 1ULL);
            }
        }
        __syncthreads();
        if (thread == 0) {
            unsigned long long count = above, mass = above_mass;
            int digit = kDigits - 1;
            for (; digit > 0; --digit) {
                const unsigned long long next = by_mass ? mass + s.mass[digit] : count + s.count[digit];
                if (next >= target) {
                    break;
                }
                count += s.count[digit];
                mass += s.mass[digit];
            }
            s.result[0] = static_cast<unsigned long long>(digit);
            s.result[1] = count;
            s.result[2] = mass;
        }
        __syncthreads();
        prefix = prefix << 8 | s.result[0];
        above = s.result[1];
        above_mass = s.result[2];
        __syncthreads();
    }
    if (prefix < kept.least || prefix == 0) {
        return kept;
    }
    const std::uint64_t missing = target - (by_mass ? above_mass : above);
    std::uint64_t equal = by_mass ? (missing + prefix - 1) / prefix : missing;
    if (prefix == kept.least && kept.equal < equal) {
        equal = kept.equal;
    }
    return {prefix, equal, above_mass + equal * prefix};
}

// The id at place `target` of the kept mass, counted in order of ids. Warps have neighbouring ids each.
template <typename T>
__device__ int draw_by_id(const SampleParams<T>& p, const T* logits, float top, float factor, const Kept& kept,
                          std::uint64_t random, SampleShared& s) {
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int span = (p.vocabulary + kSampleThreads - 1) / kSampleThreads * 32;
    const int begin = min(warp * span, p.vocabulary), end = min(begin + span, p.vocabulary);
    unsigned long long mass = 0, equals = 0;
    for (int i = begin + lane; i < end; i += 32) {
        const std::uint64_t weight = weight_of_logit(to_float(logits[i]), top, factor);
        mass += weight > kept.least ? weight : 0;
        equals += weight == kept.least && weight > 0 ? 1 : 0;
    }
    s.before[warp] = reduce_warp(mass, Add{});
    s.equals[warp] = reduce_warp(equals, Add{});
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned long long left = kept.equal, total = 0;
        for (int i = 0; i < kSampleWarps; ++i) {  // what of each warp is kept, then where each begins
            const unsigned long long some = s.equals[i] < left ? s.equals[i] : left;
            s.equals[i] = some;
            left -= some;
            const unsigned long long here = s.before[i] + some * kept.least;
            s.before[i] = total;
            total += here;
        }
        // random * total / 2^53, in two halves
        const std::uint64_t high = random >> 32, low = random & 0xffffffffU;
        const std::uint64_t total_high = total >> 32, total_low = total & 0xffffffffU;
        const std::uint64_t middle = high * total_low + (low * total_low >> 32), other = low * total_high;
        const std::uint64_t carry = ((middle & 0xffffffffU) + (other & 0xffffffffU));
        const std::uint64_t top_half = high * total_high + (middle >> 32) + (other >> 32) + (carry >> 32);
        s.result[0] = top_half << 11 | (carry & 0xffffffffU) >> 21;
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
            const std::uint64_t weight = i < end ? weight_of_logit(to_float(logits[i]), top, factor) : 0;
            const unsigned equal = __ballot_sync(kAllLanes, weight == kept.least && weight > 0);
            const auto rank = static_cast<unsigned long long>(__popc(equal & ((1U << lane) - 1)));
            const bool stays = weight > kept.least || (weight == kept.least && weight > 0 && rank < left);
            unsigned long long sum = stays ? weight : 0;
            for (int by = 1; by < 32; by *= 2) {
                const unsigned long long other = __shfl_up_sync(kAllLanes, sum, by);
                sum += lane >= by ? other : 0;
            }
            if (stays && target >= at + sum - weight && target < at + sum) {
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
    const float factor = 1.44269504F / fmaxf(p.temperature[row], 1e-30F);
    unsigned long long total = 0;
    for (int i = thread; i < p.vocabulary; i += kSampleThreads) {
        total += weight_of_logit(to_float(logits[i]), highest, factor);
    }
    Kept kept{0, 0, reduce_block(total, s.space, Add{})};
    const int top_k = p.top_k[row];
    if (top_k > 0 && top_k < p.vocabulary) {
        kept = cut_prefix(p, logits, highest, factor, kept, false, static_cast<std::uint64_t>(top_k), s);
    }
    if (p.top_p[row] < 1.0F) {
        const auto target =
            static_cast<std::uint64_t>(static_cast<double>(p.top_p[row]) * static_cast<double>(kept.mass));
        kept = cut_prefix(p, logits, highest, factor, kept, true, target > 0 ? target : 1, s);
    }
    if (p.min_p[row] > 0.0F) {
        const auto least = static_cast<std::uint64_t>(p.min_p[row] * 1099511627776.0F);
        if (least > kept.least) {
            kept = {least, ~0ULL, 0};
        }
    }
    const std::uint64_t random =
        random_bits(static_cast<std::uint64_t>(p.seed[row]), static_cast<std::uint32_t>(p.branch[row]),
                    static_cast<std::uint32_t>(p.index[row]));
    const int id = draw_by_id(p, logits, highest, factor, kept, random, s);
    if (thread == 0) {
        p.ids[row] = id;
    }
}

}  // namespace octavo::cuda
