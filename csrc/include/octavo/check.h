// Checks the arguments of the ops of api.h without computing anything: the kernels and their definitions (ref/) refuse
// the same arguments with the same words. A check throws ArgumentError and reads no memory but that of ids, lengths and
// scales.
#pragma once

#include "octavo/api.h"

namespace octavo::check {

void kv_cache(const KvCache& kv);
void cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots);
void paged_attention(const TensorRef& out, const TensorRef& queries, const KvCache& kv, const BatchRef& batch,
                     const AttentionOptions& options);
void rotary(const TensorRef& heads, const TensorRef& positions, const TensorRef& cos, const TensorRef& sin,
            std::int64_t rotated);
void rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight);
void silu_and_mul(const TensorRef& out, const TensorRef& x);
void linear_recurrence(const TensorRef& out, const TensorRef& state, const TensorRef& queries, const TensorRef& keys,
                       const TensorRef& values, const TensorRef& decays, const TensorRef& rates);
void linear(const TensorRef& out, const TensorRef& x, const Weight& weight, const TensorRef& bias);
void weight_rows(const TensorRef& out, const Weight& weight, const TensorRef& rows);
void copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs);
void staged_blocks(const TensorRef& staging, const TensorRef& arena, const TensorRef& ids, std::int64_t begin);
void scatter_blocks(const TensorRef& arena, const TensorRef& staging, const TensorRef& ids, std::int64_t begin);
void populate_blocks(const TensorRef& arena, std::int64_t first, std::int64_t end);
void checksum_blocks(const TensorRef& sums, const TensorRef& arena, const TensorRef& ids);

}  // namespace octavo::check
