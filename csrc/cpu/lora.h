// What adapters add to the products of a step, within a run of the pool: every thread calls these functions, in the
// same order.
#pragma once

#include "kernels.h"
#include "octavo/llama.h"
#include "octavo/pool.h"

namespace octavo {

using LoraStackOf = LoraStack LoraLayer::*;

// Of a number of a plain matrix.
inline std::int64_t plain_bytes(Format format) { return format == Format::kF32 ? 4 : 2; }

// A product of the step, to which adapters add. Both matrices have a row for each token.
struct LoraJob {
    std::size_t layer;
    LoraStackOf stack;
    const float* x;
    std::int64_t cols;  // of x
    float* y;
    std::int64_t rows;  // from row to row of y, at least those of the stack
    float* low;         // room for `low_rows` floats for each of the step's lora_rows
    std::int64_t low_rows;
    LowRank* low_rank;  // of each token: what a product adds, nothing for tokens without an adapter
};

// The most rows that any of the step's adapters has in a matrix `a`.
std::int64_t lora_low_rows(const LlamaStep& step);

// ArgumentError unless the step's lora_rows and loras fit each other and a step of `num_tokens`.
void check_lora_rows(const LlamaStep& step, std::int64_t num_tokens);

// ArgumentError unless the stack adds to y [.., rows] of x [.., cols].
void check_lora_stack(const LoraStack& stack, const char* name, std::int64_t rows, std::int64_t cols);

// Makes `low` and `low_rank` of x: products add the rest, or add_lora does for rows [first, end) of the stack once they
// are there. The order of each sum depends on the row alone.
void shrink_lora(PoolThread& thread, int threads, const LlamaStep& step, const LoraJob& job);
void add_lora(PoolThread& thread, int threads, const LlamaStep& step, const LoraJob& job, std::int64_t first,
              std::int64_t end);

}  // namespace octavo
