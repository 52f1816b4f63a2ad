// Kernels before and after a token is drawn: bias and penalties; log probabilities and the likeliest tokens.
#pragma once

#include <limits>

#include "common/fault.cuh"
#include "common/numeric.cuh"
#include "common/reduce.cuh"

namespace octavo::cuda {

constexpr int kLogitThreads = 512;
constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr float kUnknown = std::numeric_limits<float>::quiet_NaN();

template <typename T>
struct PenaltyParams {
    T* logits;                    // [rows, vocabulary]
    const std::int32_t* offsets;  // [rows + 1]: a row's entries
    const std::int64_t* ids;      // [entries], each once in its row; outside the vocabulary: skipped
    const std::int32_t* counts;  // [entries]: how often the token is in the output; 0: in the prompt alone; -1: nowhere
    const float* bias;           // [entries] or null: added last
    const float* repetition;     // [rows]: divides what is positive, multiplies what is negative
    const float* presence;       // [rows]: subtracted once
    const float* frequency;      // [rows]: subtracted for each occurrence
    std::int64_t row_stride, num_entries;
    FaultWord fault;
    int vocabulary;
};

// A block per row.
template <typename T>
__global__ void __launch_bounds__(kLogitThreads) penalize_kernel(const PenaltyParams<T> p) {
    const int row = static_cast<int>(blockIdx.x);
    T* logits = p.logits + row * p.row_stride;
    const float repetition = p.repetition[row], presence = p.presence[row], frequency = p.frequency[row];
    const std::int64_t begin = p.offsets[row], end = p.offsets[row + 1];
    if (begin < 0 || end > p.num_entries) {
        tell(p.fault, Fault::kOffsets);
        return;
    }
#pragma unroll 1  // a division calls a subroutine: several at once spill
    for (std::int64_t i = begin + threadIdx.x; i < end; i += kLogitThreads) {
        const std::int64_t id = p.ids[i];
        if (id < 0 || id >= p.vocabulary) {
            continue;
        }
        float x = to_float(logits[id]);
        const int count = p.counts[i];
        if (count >= 0) {
            x = x > 0.0F ? x / repetition : x * repetition;
            x -= frequency * static_cast<float>(count) + (count > 0 ? presence : 0.0F);
        }
        from_float(p.bias ? x + p.bias[i] : x, logits[id]);
    }
}

template <typename T>
struct LogprobParams {
    const T* logits;          // [rows, vocabulary]
    const std::int64_t* ids;  // [rows]: whose log probability is asked for
    float* chosen;            // [rows]
    float* values;            // [rows, num_top]: falling; equals by rising id
    std::int64_t* tokens;     // [rows, num_top]; -1 where nothing of any probability is left
    std::int64_t row_stride;
    int vocabulary, num_top;
};

// A block per row. A row with NaN or +inf, or nothing finite, gives NaN and lists nothing.
template <typename T>
__global__ void __launch_bounds__(kLogitThreads) logprobs_kernel(const LogprobParams<T> p) {
    const std::int64_t row = blockIdx.x;
    const T* logits = p.logits + row * p.row_stride;
    auto* space = reinterpret_cast<float*>(shared_memory());
    const int thread = static_cast<int>(threadIdx.x);
    float top = kLowest;
    int bad = 0;
    for (int i = thread; i < p.vocabulary; i += kLogitThreads) {
        const float x = to_float(logits[i]);
        bad |= x != x || x == -kLowest ? 1 : 0;
        top = fmaxf(top, x);
    }
    top = reduce_block(top, space, Larger{});
    bad = reduce_block(bad, reinterpret_cast<int*>(space), Larger{}) | (top == kLowest ? 1 : 0);
    float sum = 0.0F;
    for (int i = thread; i < p.vocabulary; i += kLogitThreads) {
        sum += expf(to_float(logits[i]) - top);
    }
    const float total = top + logf(reduce_block(sum, space, Add{}));
    const std::int64_t id = p.ids[row];
    if (thread == 0) {
        const bool known = id >= 0 && id < p.vocabulary && bad == 0;
        p.chosen[row] = known ? to_float(logits[id]) - total : kUnknown;
    }
    float above = -kLowest;  // the latest one listed, and its id
    int above_id = -1;
    for (int place = 0; place < p.num_top; ++place) {
        float best = kLowest;
        int best_id = p.vocabulary;
        for (int i = thread; i < p.vocabulary; i += kLogitThreads) {
            const float x = to_float(logits[i]);
            if ((x < above || (x == above && i > above_id)) && x > best) {
                best = x;
                best_id = i;
            }
        }
        const float highest = reduce_block(best, space, Larger{});
        const int mine = best == highest ? best_id : p.vocabulary;
        const int lowest_id = -reduce_block(-mine, reinterpret_cast<int*>(space), Larger{});
        const bool none = bad != 0 || highest == kLowest;
        if (thread == 0) {
            p.values[row * p.num_top + place] = none ? kLowest : highest - total;
            p.tokens[row * p.num_top + place] = none ? -1 : lowest_id;
        }
        above = highest;
        above_id = lowest_id;
    }
}

}  // namespace octavo::cuda
