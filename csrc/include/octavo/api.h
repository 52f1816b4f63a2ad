// One function per op. Each checks its arguments, throws ArgumentError naming the one that is wrong before any memory
// is touched, and returns when the result is there. Outputs are the caller's. Floats are float32, float16 or bfloat16
// where not said otherwise; sums are made in float32.
//
// Letters: t tokens, h query heads, g key-value heads, d head_dim, n blocks, b block_size, s sequences.
#pragma once

#include "octavo/tensor.h"
#include "octavo/weight.h"

namespace octavo {

struct AttentionOptions {
    float scale = 1;
    std::int64_t window = 0;  // keys a query sees, its own included; 0: all before it
    float soft_cap = 0;       // scores become cap * tanh(score / cap); 0: they stay
    TensorRef alibi;          // f32 [h] or no data
    TensorRef sinks;          // f32 [h] or no data
};

// Where a step's sequences are: see gpu_worker/ops/batch.py.
struct BatchRef {
    TensorRef cu_q;      // i32 [s + 1]
    TensorRef seq_lens;  // i32 [s]
    TensorRef tables;    // i32 [s, any]
};

// kv [n, g, 2, b, d] by any strides, d contiguous (hnd or nhd); keys, values [t, g, d]; slots i64 [t], -1: skipped.
void cache_write(const TensorRef& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots);

// out, queries [t, h, d]. d a multiple of 8 up to 256, b a multiple of 8.
void paged_attention(const TensorRef& out, const TensorRef& queries, const TensorRef& kv, const BatchRef& batch,
                     const AttentionOptions& options);

// out, heads [t, h, d]; cos, sin f32 [t, rotated], both halves alike.
void rotary(const TensorRef& out, const TensorRef& heads, const TensorRef& cos, const TensorRef& sin);

// out, x [rows, columns]; weight [columns] f32.
void rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight, float eps);

// sum += x, then out = rms_norm(sum).
void fused_add_rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& sum, const TensorRef& weight,
                        float eps);

// x [rows, 2 c]: out [rows, c] = act(first half) * second half.
void silu_and_mul(const TensorRef& out, const TensorRef& x);
void gelu_and_mul(const TensorRef& out, const TensorRef& x);

// out f32 [t, weight.rows] = x f32 [t, weight.cols] * weightᵀ + bias f32 [rows] (or no data).
void linear(const TensorRef& out, const TensorRef& x, const Weight& weight, const TensorRef& bias);

// A row of a weight, decoded: out f32 [cols].
void weight_rows(const TensorRef& out, const Weight& weight, const TensorRef& rows);

// source, target [layers, n, ...] with a block's bytes together; pairs i64 [m, 2]: (from, to). All are read before one
// is written if source and target are the same.
void copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs);

// packed [m, layers, ...]: blocks one after the other, all layers of each. ids i64 [m].
void gather_blocks(const TensorRef& packed, const TensorRef& arena, const TensorRef& ids);
void scatter_blocks(const TensorRef& arena, const TensorRef& packed, const TensorRef& ids);

// sums i64 [m]: equal for equal bytes of all layers of a block, whatever its id.
void checksum_blocks(const TensorRef& sums, const TensorRef& arena, const TensorRef& ids);

// target = source for [n, g, 2, b, d] of any strides and float types: moves between layouts, rounds between types.
void convert_layout(const TensorRef& target, const TensorRef& source);

// Attention to two disjoint sets of keys as one to both: parts f32 [p, t, h, d], lse f32 [p, t, h].
void merge_states(const TensorRef& out, const TensorRef& parts, const TensorRef& lse);

// ids i64 [rows]: the highest of x f32 [rows, columns], the lowest id on ties, a NaN's where there is one.
void argmax(const TensorRef& ids, const TensorRef& x);

}  // namespace octavo
