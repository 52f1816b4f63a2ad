// The CUDA ops, one function each. Tensors lie on the current device. An op queues its work on `stream` and does not
// wait. Bad arguments throw ArgumentError before anything is queued; a failing device throws DeviceError.
//
// Indices and lengths that lie on the device cannot be checked here without waiting for the device. Kernels check them:
// they do not follow an index that leads nowhere, and tell the host, which asks take_fault (device.h) when it has
// waited for other reasons.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "octavo/tensor.h"

namespace octavo::cuda {

using StreamHandle = void*;

// A layer of keys and values. `keys` and `values` are [num_blocks, kv_head, block_size, head_dim] for hnd and nhd, of
// any strides with contiguous dimensions; for xpack [num_blocks, kv_head, head_dim / x, block_size, x] and [num_blocks,
// kv_head, head_dim, block_size]. type: "auto", "fp8_e4m3" (or "fp8"), "fp8_e5m2" or "int8".
struct KvCache {
    TensorRef keys, values;
    std::string type = "auto";
    TensorRef key_scale, value_scale;  // float32 [1] or [kv_head], positive (not checked); no data: 1
    // For int8 also float16 [num_blocks, kv_head, block_size]: a scale for each slot, made when the slot is written.
};

// How scores are made, as gpu_worker.ops.AttentionOptions says. Block-sparse attention, as vLLM defines it: a query
// sees the last `local_blocks` blocks of `block_size` keys and each `vert_stride`-th, which one depending on the head.
struct BlockSparse {
    int local_blocks = 0, vert_stride = 0, block_size = 64, head_sliding_step = 0, tp_rank = 0;
};
struct Attention {
    float scale = 1.0F, soft_cap = 0.0F;
    int window = 0;
    TensorRef alibi, sinks;  // float32 [heads], or no data
    BlockSparse sparse;
};

// ---- cache ---------------------------------------------------------------------------------------------------------

// Stores keys, values [tokens, kv_head, head_dim] at slots int64 [tokens].
void cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots,
                 StreamHandle stream);
// As cache_write, with queries (in place) and keys rotated first: dimension i of a head turns with i + rotated / 2, or
// interleaved 2 i with 2 i + 1. cos, sin [rows, rotated / 2 or more] in float32 or the keys' type; a token's row is
// positions[token], or the token without positions.
void rope_cache_write(const KvCache& kv, const TensorRef& queries, const TensorRef& keys, const TensorRef& values,
                      const TensorRef& positions, const TensorRef& cos, const TensorRef& sin, int rotated,
                      const TensorRef& slots, bool interleaved, StreamHandle stream);
// Copies blocks (from, to) of pairs int64 [n, 2], on the device, between arenas [layers, blocks, ...] of one form,
// which may be one arena; either may be pinned host memory. The caller makes sure that no block is both read and
// written, and none is written twice: the kernel does not check it. num_ctas: thread blocks at most; 0: as many as
// help.
void copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs, int num_ctas,
                 StreamHandle stream);
// Copies bytes [begin, begin + length) of each layer of blocks ids int64 [n] to or from staging uint8 [n, layers,
// length].
void gather_blocks(const TensorRef& arena, const TensorRef& ids, const TensorRef& staging, std::int64_t begin,
                   StreamHandle stream);
void scatter_blocks(const TensorRef& arena, const TensorRef& ids, const TensorRef& staging, std::int64_t begin,
                    StreamHandle stream);
// out int64 [n]: the checksum of each block of ids int64 [n], which is equal on every device (octavo/checksum.h).
void checksum_blocks(const TensorRef& arena, const TensorRef& ids, const TensorRef& out, StreamHandle stream);
// One of source and target is uint8 and holds numbers of `type`, the other one is float. Numbers become source / scale
// on the way to 8 bits, and source * scale on the way back.
void convert_fp8(const TensorRef& target, const TensorRef& source, float scale, const std::string& type,
                 StreamHandle stream);

// ---- rows ----------------------------------------------------------------------------------------------------------

void rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight, float eps, StreamHandle stream);
// residual += x; then x = rms_norm(residual).
void fused_add_rms_norm(const TensorRef& x, const TensorRef& residual, const TensorRef& weight, float eps,
                        StreamHandle stream);
// out [n, d], x [n, 2 d]: silu(first half) * second half.
void silu_and_mul(const TensorRef& out, const TensorRef& x, StreamHandle stream);
// out [tokens, rows] = x [tokens, columns] weight [rows, columns]^T + bias [rows] (or no data), all of one type, summed
// in float32. A token's bits do not depend on the others. Rows of x lie at multiples of 16 bytes where those of the
// weight do, and columns are a multiple of 8 (in 16 bits).
void linear(const TensorRef& out, const TensorRef& x, const TensorRef& weight, const TensorRef& bias,
            StreamHandle stream);
// The same with a packed matrix, uint8 [bytes], in 16 bits alone. format: "q4", "q4_mins" or "e4m3"
// (linear_weights.cuh says how each lies). Columns are a multiple of 8. The bits are those of the decoded matrix.
void linear_packed(const TensorRef& out, const TensorRef& x, const TensorRef& weight, const std::string& format,
                   const TensorRef& bias, StreamHandle stream);
// Rounds x [tokens, columns], in 16 bits, to e4m3 for linear_fp8: out uint8 [tokens, 80 for each 64 columns]
// (linear_fp8.cuh says how it lies). `group` columns share a scale, a multiple of 64; 0: all of a token. The scale is
// the group's largest number / 448, or `scale` where that is not 0, and larger numbers then become 448 times it.
void round_inputs(const TensorRef& out, const TensorRef& x, std::int64_t group, float scale, StreamHandle stream);
// out [tokens, rows], in 16 bits, = x weight^T + bias, with x of round_inputs and a packed matrix "e4m3". A token's
// bits do not depend on the others. NaN where the device does not multiply e4m3 (multiplies_fp8).
void linear_fp8(const TensorRef& out, const TensorRef& x, const TensorRef& weight, const TensorRef& bias,
                StreamHandle stream);
// ids int64 [n]: -1 where logits [n, vocabulary] have NaN, +inf or nothing finite. temperature 0: the highest logit,
// the lowest id among equals. Else the draw of (seed; branch, index), with top_k (0: off), top_p, min_p and filters
// float32 [n, filters::kColumns] (octavo/filters.h).
void sample(const TensorRef& ids, const TensorRef& logits, const TensorRef& temperature, const TensorRef& top_k,
            const TensorRef& top_p, const TensorRef& min_p, const TensorRef& filters, const TensorRef& seed,
            const TensorRef& branch, const TensorRef& index, StreamHandle stream);

// Changes logits [n, vocabulary] in place, before `sample`. A row has the entries [offsets[row], offsets[row + 1]) of
// ids int64, counts int32 (how often in the output; 0: only in the prompt; -1: in neither) and bias float32 (or no
// data). An id occurs once in a row. Logits of tokens that were seen are divided (negative ones multiplied) by
// repetition [n]; frequency [n] per occurrence and presence [n] are subtracted; bias is added (minus infinity bans).
void penalize(const TensorRef& logits, const TensorRef& offsets, const TensorRef& ids, const TensorRef& counts,
              const TensorRef& bias, const TensorRef& repetition, const TensorRef& presence, const TensorRef& frequency,
              StreamHandle stream);
// The log-softmax: chosen float32 [n], of ids int64 [n]; values float32 and tokens int64 [n, k], of the k likeliest
// tokens, lower ids first among equals, -1 where fewer tokens have a probability. A row that `sample` refuses has NaN
// and no tokens.
void logprobs(const TensorRef& chosen, const TensorRef& values, const TensorRef& tokens, const TensorRef& logits,
              const TensorRef& ids, StreamHandle stream);

// ---- attention -----------------------------------------------------------------------------------------------------

// A plan (plan/attention_plan.h) on the device.
struct PlanRef {
    TensorRef slots;     // int32 [num_slots + 1]
    TensorRef items;     // int32 [capacity, 8]
    TensorRef counters;  // int32 [partials], zeros; zeros again after each call
    TensorRef partials;  // float32 [partials, rows * (head_dim + 2)], at a multiple of 16 bytes
};

// What the planner needs to know of a kernel: how many rows its tiles have, and how many of its thread blocks run at
// once (slots).
struct KernelShape {
    int rows, slots;
};
// kernel: "decode_mma" (few rows: those of a decode), "prefill_mma" or "simt". rows: the most that a sequence of the
// batch has for a kv head (its queries times the heads of a group).
KernelShape attention_kernel(const std::string& kernel, DType queries, const std::string& kv_type, int head_dim,
                             int rows);

// queries, out [tokens, heads, head_dim]; tables int32 [sequences, n]; cu_q int32 [sequences + 1]; lens int32
// [sequences]: a sequence's queries are its last tokens. Computes the sequences that the plan names; rows: of its
// tiles.
void paged_attention(const std::string& kernel, int rows, const TensorRef& out, const TensorRef& queries,
                     const KvCache& kv, const TensorRef& tables, const TensorRef& cu_q, const TensorRef& lens,
                     const PlanRef& plan, const Attention& attention, StreamHandle stream);
// vLLM's kernel: one thread block per query head and partition. Without partitions, partition_size is 0 and the three
// tensors of partial results have no data.
void vllm_paged_attention(const TensorRef& out, const TensorRef& exp_sums, const TensorRef& max_logits,
                          const TensorRef& partial_out, const TensorRef& queries, const KvCache& kv,
                          const TensorRef& tables, const TensorRef& lens, int max_len, int partition_size,
                          const Attention& attention, StreamHandle stream);

}  // namespace octavo::cuda
