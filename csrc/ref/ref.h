// The definitions of the ops of octavo/api.h: the same functions, one obvious step after another, in double precision
// and in one thread. They have the arguments, checks and errors of the kernels, and the same results but for rounding.
// They are slow, and only tests call them.
#pragma once

#include "octavo/api.h"
#include "octavo/check.h"

namespace octavo::ref {

void cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots);
void paged_attention(const TensorRef& out, const TensorRef& queries, const KvCache& kv, const BatchRef& batch,
                     const AttentionOptions& options);
void rotary(const TensorRef& heads, const TensorRef& positions, const TensorRef& cos, const TensorRef& sin,
            std::int64_t rotated, bool interleaved);
void rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight, float eps);
void silu_and_mul(const TensorRef& out, const TensorRef& x);
void linear_recurrence(const TensorRef& out, const TensorRef& state, const TensorRef& queries, const TensorRef& keys,
                       const TensorRef& values, const TensorRef& decays, const TensorRef& rates);
void linear(const TensorRef& out, const TensorRef& x, const Weight& weight, const TensorRef& bias);
void weight_rows(const TensorRef& out, const Weight& weight, const TensorRef& rows);
void copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs);
void gather_blocks(const TensorRef& staging, const TensorRef& arena, const TensorRef& ids, std::int64_t begin);
void scatter_blocks(const TensorRef& arena, const TensorRef& staging, const TensorRef& ids, std::int64_t begin);
void checksum_blocks(const TensorRef& sums, const TensorRef& arena, const TensorRef& ids);

}  // namespace octavo::ref
