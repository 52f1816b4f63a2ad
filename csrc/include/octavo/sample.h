// Samples tokens from logits for a whole batch at once, as gpu_worker/sampling/sampler.py defines it. In this order:
// logits are adjusted; log probabilities are the log-softmax of the result; a mask leaves out tokens, then temperature,
// top-k, top-p and min-p do, and then further filters; a draw chooses one.
//
// The first filters keep a prefix of the tokens, ordered by falling logit, then rising id. The further ones (filters.h)
// narrow it down. The draw goes by id among those kept (draw.h). A branch's token depends on its own row and parameters
// alone.
#pragma once

#include <vector>

#include "octavo/tensor.h"

namespace octavo {

constexpr std::int64_t kBadLogits = -1;    // instead of a token, if the row has NaN or +inf, or no finite logit
constexpr std::int64_t kNothingLeft = -2;  // if the mask allows no token that has a finite logit

// How each of r branches draws.
struct Draws {
    TensorRef rows;                 // i64 [r]: of the logits; several branches may share one
    TensorRef temperature;          // f32 [r]; 0: the highest logit, the lowest id on ties
    TensorRef top_k;                // i32 [r]; 0: off
    TensorRef top_p, min_p;         // f32 [r]; 1 and 0: off
    TensorRef filters;              // f32 [r, filters::kColumns], 0 to 1. No data: off
    TensorRef seed, branch, index;  // i64 [r], the seed as 64 bits: what the random number comes from
    TensorRef mask_of;              // i32 [r]: which row of `masks` says what may be drawn; -1: all. No data: all -1
    TensorRef masks;                // i32 [m, (vocabulary + 31) / 32]: a bit per token, the least bit first
    TensorRef drawn;                // i64 [r]: a token that was drawn already, or -1. No data: all -1
};

// The changes of the logits of each branch: the bias first, then penalties, then the mask. Branch i has the entries
// [ends[i], ends[i + 1]) of a list. No data: no change.
struct Adjustments {
    TensorRef repetition;                       // f32 [r]: divides positive, multiplies negative logits of `seen`
    TensorRef seen_ends, seen_ids, seen_costs;  // i64 [r + 1], i64 [m], f32 [m]: subtracted then
    TensorRef bias_ends, bias_ids, biases;      // i64 [r + 1], i64 [m], f32 [m]: added first; -inf bans
    TensorRef allowed_ends, allowed_ids;        // i64 [r + 1], i64 [m]: where there are some, all others are banned
};

// Memory for log probabilities. No data: none are asked for.
struct Scores {
    TensorRef counts;        // i32 [r]: how many of the likeliest are listed, at most n; -1: no score at all
    TensorRef logprobs;      // f32 [r]: that of the chosen token; NaN where the logits are bad
    TensorRef top_ids;       // i64 [r, n]: likeliest first, lowest id first among equals; -1: no more that are possible
    TensorRef top_logprobs;  // f32 [r, n]
    TensorRef totals;        // i64 [r]: the sum of the weights (draw.h) of a row that is not all here; 0: it is
};

// ids i64 [r], logits f32 [rows, vocabulary].
void sample(const TensorRef& ids, const TensorRef& logits, const Draws& draws, const Adjustments& adjustments,
            const Scores& scores);

// The log probabilities of targets i64 [r], by the unchanged logits f32 [r, vocabulary].
void score(const TensorRef& logits, const TensorRef& targets, const Scores& scores);

// Which of x [count] are the `num` likeliest, of those that are possible, in no order. Of equal ones the first.
std::vector<std::int64_t> likeliest(const float* x, std::int64_t count, std::int64_t num);

namespace check {
void sample(const TensorRef& ids, const TensorRef& logits, const Draws& draws, const Adjustments& adjustments,
            const Scores& scores);
void score(const TensorRef& logits, const TensorRef& targets, const Scores& scores);
// What WantedLogits are made of.
void wanted(std::int64_t rows, std::int64_t vocabulary, const Draws& draws, const Adjustments& adjustments,
            const TensorRef& counts, const TensorRef& targets, const TensorRef& drawn, const TensorRef& totals);
}  // namespace check

namespace ref {
void sample(const TensorRef& ids, const TensorRef& logits, const Draws& draws, const Adjustments& adjustments,
            const Scores& scores);
void score(const TensorRef& logits, const TensorRef& targets, const Scores& scores);
}  // namespace ref

}  // namespace octavo
