// One function per op. Each checks its arguments, throws ArgumentError naming the one that is wrong before any memory
// is touched, and returns when the result is there. Outputs are the caller's. Floats are float32, float16 or bfloat16
// where not said otherwise; sums are made in float32.
//
// Letters: t tokens, h query heads, g key-value heads, d head_dim, n blocks, b block_size, s sequences.
#pragma once

#include "octavo/tensor.h"
#include "octavo/weight.h"

namespace octavo {

// A layer's keys and values, in one of these forms:
//   hnd, nhd  keys, values [n, g, b, d] by any strides, d contiguous
//   the same  keys [n, g, 2, b, d] and no values: keys come before values
//   xpack     keys [n, g, d / x, b, x], values [n, g, d, b]
//   paged     keys int8 [n, g, 2, b, d + 2] and no values: of each page (the last two dimensions, contiguous) b * d
//             numbers come first, then b float16 scales, one for each slot
// Elements are float32, float16, bfloat16, float8_e4m3fn, float8_e5m2 or int8; `type` says what uint8 stands for: "fp8"
// (or "fp8_e4m3"), "fp8_e5m2" or "int8". Scales: what is stored times its scale is what was given; f32 [1] or [g], or
// no data: 1. Writing rounds to nearest, ties to even, and saturates; NaN stays NaN (in int8 with static scales, which
// has none, it becomes -127).
struct KvCache {
    TensorRef keys, values;
    std::string type = "auto";
    TensorRef key_scale, value_scale;
};

// As vLLM defines it: a query sees the last `local_blocks` blocks of `block_size` keys, its own included, and each
// `vert_stride`-th; which one depends on the head. Off unless vert_stride > 1.
struct BlockSparse {
    std::int64_t local_blocks = 0, vert_stride = 0, block_size = 64, head_sliding_step = 0, tp_rank = 0;
};

struct AttentionOptions {
    float scale = 1;
    std::int64_t window = 0;  // keys a query sees, its own included; 0: all before it
    float soft_cap = 0;       // scores become cap * tanh(score / cap); 0: they stay
    TensorRef alibi;          // f32 [h] or no data
    TensorRef sinks;          // f32 [h] or no data
    BlockSparse sparse;
};

// Where a step's sequences are: see gpu_worker/ops/batch.py.
struct BatchRef {
    TensorRef cu_q;      // i32 [s + 1]
    TensorRef seq_lens;  // i32 [s]
    TensorRef tables;    // i32 [s, any]
};

// keys, values [t, g, d]; slots i64 [t], -1: skipped.
void cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots);

// out, queries [t, h, d]. d a multiple of 8 up to 256, b a multiple of 8. A query that sees no key gives 0.
void paged_attention(const TensorRef& out, const TensorRef& queries, const KvCache& kv, const BatchRef& batch,
                     const AttentionOptions& options);

// heads [t, h, d], in place. cos, sin f32 [rows, rotated / 2 or more]; a token's row is positions i64 [t], or the token
// without them. Dimension i turns with i + rotated / 2; interleaved: 2 i with 2 i + 1.
void rotary(const TensorRef& heads, const TensorRef& positions, const TensorRef& cos, const TensorRef& sin,
            std::int64_t rotated, bool interleaved);

// out, x [rows, columns]; weight [columns] f32.
void rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight, float eps);

// x [rows, 2 c]: out [rows, c] = silu(first half) * second half.
void silu_and_mul(const TensorRef& out, const TensorRef& x);

// out f32 [t, weight.rows] = x f32 [t, weight.cols] * weightᵀ + bias f32 [rows] (or no data).
void linear(const TensorRef& out, const TensorRef& x, const Weight& weight, const TensorRef& bias);

// A row of a weight, decoded: out f32 [cols].
void weight_rows(const TensorRef& out, const Weight& weight, const TensorRef& rows);

// source, target [layers, n, ...] with a block's bytes together; pairs i64 [m, 2]: (from, to), none written twice. All
// are read before one is written if source and target are the same.
void copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs);

// Bytes from `begin` on of each layer of blocks ids i64 [m], to or from staging [m, layers, ...], which says how many;
// no block is scattered to twice.
void gather_blocks(const TensorRef& staging, const TensorRef& arena, const TensorRef& ids, std::int64_t begin);
void scatter_blocks(const TensorRef& arena, const TensorRef& staging, const TensorRef& ids, std::int64_t begin);

// sums i64 [m]: equal for equal bytes of all layers of a block, whatever its id and device (checksum.h).
void checksum_blocks(const TensorRef& sums, const TensorRef& arena, const TensorRef& ids);

}  // namespace octavo
