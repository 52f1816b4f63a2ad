// One function per op. It checks its arguments, throws ArgumentError naming the wrong one before any memory is touched,
// and returns when the result is there. The caller owns all outputs. Floats are float32, float16 or bfloat16 unless a
// comment says otherwise; sums are made in float32.
//
// Letters: t tokens, h query heads, g key-value heads, d head_dim, n blocks, b block_size, s sequences.
#pragma once

#include "octavo/tensor.h"
#include "octavo/weight.h"

namespace octavo {

// A layer's keys and values, in one of these forms:
//   hnd, nhd  keys, values [n, g, b, d] by any strides, d contiguous
//   joint     keys [n, g, 2, b, d] and no values: keys lie before values, by any strides, d contiguous
//   xpack     keys [n, g, d / x, b, x], values [n, g, d, b]
//   paged     keys int8 [n, g, 2, b, d + 2] and no values: each page (the last two dimensions, contiguous) has first
//             b * d numbers, then b float16 scales, one for each slot
// Elements are float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8; `type` says what uint8 stands for: "fp8"
// (or "fp8_e4m3"), "fp8_e5m2" or "int8". A stored number times its scale is the number that was written; static scales
// are f32 [1] or [g], and no data means 1. Writing rounds to nearest, ties to even, and saturates. NaN stays NaN,
// except in int8 with static scales, which has no NaN: there it becomes -127.
struct KvCache {
    TensorRef keys, values;
    std::string type = "auto";
    TensorRef key_scale, value_scale;
};

// Block-sparse attention as vLLM defines it: a query sees the last `local_blocks` blocks of `block_size` keys, its own
// included, and every `vert_stride`-th block, the first of which depends on the head. Off unless vert_stride > 1.
struct BlockSparse {
    std::int64_t local_blocks = 0, vert_stride = 0, block_size = 64, head_sliding_step = 0, tp_rank = 0;
};

struct AttentionOptions {
    float scale = 1;
    std::int64_t window = 0;  // how many keys a query sees, its own included; 0: all keys before it
    float soft_cap = 0;       // scores become cap * tanh(score / cap); 0: they stay
    TensorRef alibi;          // f32 [h] or no data
    TensorRef sinks;          // f32 [h] or no data
    BlockSparse sparse;
    // f32 [h, 2 n + 1] or no data: what is added to the score of a key that is so far after its query, from -n to n.
    // Those that are further get what the last one gets.
    TensorRef bias{};
    bool both_ways = false;  // a query sees all keys of its sequence; there is no window
};

// The sequences of a step, as gpu_worker/ops/batch.py explains.
struct BatchRef {
    TensorRef cu_q;      // i32 [s + 1]
    TensorRef seq_lens;  // i32 [s]
    TensorRef tables;    // i32 [s, any]
    TensorRef starts{};  // i32 [s] or no data: no query of a sequence sees keys before this position
};

// Stores keys, values [t, g, d] at slots i64 [t]; a token of slot -1 is skipped.
void cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots);

// out, queries [t, h, d], where d is a multiple of 8 up to 256 and b a multiple of 8. A query that sees no key gives 0.
void paged_attention(const TensorRef& out, const TensorRef& queries, const KvCache& kv, const BatchRef& batch,
                     const AttentionOptions& options);

// Rotates heads [t, h, d] in place. cos, sin f32 [rows, rotated / 2 or more]; the row of a token is positions i64 [t],
// or the token's own number if there are no positions. Dimension i turns with i + rotated / 2; interleaved: 2 i with 2
// i + 1.
void rotary(const TensorRef& heads, const TensorRef& positions, const TensorRef& cos, const TensorRef& sin,
            std::int64_t rotated, bool interleaved);

// out, x [rows, columns]; weight [columns] f32.
void rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight, float eps);

// x [rows, 2 c]: out [rows, c] = silu(first half) * second half.
void silu_and_mul(const TensorRef& out, const TensorRef& x);

// Tokens read and change a matrix for each head, one after another. state f32 [h, k, v] is changed in place. A token
// fades it by decays f32 [t, h] or [t, h, k], adds key · valueᵀ, and reads it by its query: out f32 [t, h, v]. With
// rates f32 [t, h] it adds rate * (value - what the faded state gives for the key) in the value's place, the delta
// rule. queries, keys f32 [t, any, k]: as many heads in a row as there are for one have it. All are contiguous.
void linear_recurrence(const TensorRef& out, const TensorRef& state, const TensorRef& queries, const TensorRef& keys,
                       const TensorRef& values, const TensorRef& decays, const TensorRef& rates);

// out f32 [t, weight.rows] = x f32 [t, weight.cols] * weightᵀ + bias f32 [rows] (or no data).
void linear(const TensorRef& out, const TensorRef& x, const Weight& weight, const TensorRef& bias);

// out f32 [t, weight.cols]: the rows i64 [t] of a weight, decoded.
void weight_rows(const TensorRef& out, const Weight& weight, const TensorRef& rows);

// Copies blocks (from, to) of pairs i64 [m, 2] between source and target [layers, n, ...], in which the bytes of a
// block and layer lie together. No block is written twice. If source and target are one, all blocks are read before one
// is written.
void copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs);

// Copies the bytes from `begin` on of each layer of blocks ids i64 [m] to or from staging [m, layers, ...], whose shape
// says how many bytes. No block is scattered to twice.
void gather_blocks(const TensorRef& staging, const TensorRef& arena, const TensorRef& ids, std::int64_t begin);
void scatter_blocks(const TensorRef& arena, const TensorRef& staging, const TensorRef& ids, std::int64_t begin);

// Faults in the memory of blocks [first, end) of arena [layers, n, ...]. What is there stays, also what somebody writes
// meanwhile.
void populate_blocks(const TensorRef& arena, std::int64_t first, std::int64_t end);

// sums i64 [m]: equal for equal bytes of all layers of a block, whatever its id and device (checksum.h).
void checksum_blocks(const TensorRef& sums, const TensorRef& arena, const TensorRef& ids);

}  // namespace octavo
