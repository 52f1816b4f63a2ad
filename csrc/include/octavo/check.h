// What each op of api.h demands of its arguments, apart from doing it: the kernels and their definition (ref/) refuse
// the same things with the same words. Each throws ArgumentError and touches no memory but that of ids and lengths.
#pragma once

#include "octavo/api.h"

namespace octavo::check {

void kv_cache(const KvCache& kv);
void cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots);
void rope_cache_write(const KvCache& kv, const TensorRef& queries, const TensorRef& keys, const TensorRef& values,
                      const TensorRef& positions, const TensorRef& cos, const TensorRef& sin, std::int64_t rotated,
                      const TensorRef& slots);
void paged_attention(const TensorRef& out, const TensorRef& queries, const KvCache& kv, const BatchRef& batch,
                     const AttentionOptions& options);
void merge_states(const TensorRef& out, const TensorRef& lse, const TensorRef& outs, const TensorRef& lses);
void rotary(const TensorRef& heads, const TensorRef& positions, const TensorRef& cos, const TensorRef& sin,
            std::int64_t rotated);
void rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight);
void fused_add_rms_norm(const TensorRef& x, const TensorRef& residual, const TensorRef& weight);
void act_and_mul(const TensorRef& out, const TensorRef& x);
void linear(const TensorRef& out, const TensorRef& x, const Weight& weight, const TensorRef& bias);
void weight_rows(const TensorRef& out, const Weight& weight, const TensorRef& rows);
void argmax(const TensorRef& ids, const TensorRef& x);
void copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs);
void staged_blocks(const TensorRef& staging, const TensorRef& arena, const TensorRef& ids, std::int64_t begin);
void checksum_blocks(const TensorRef& sums, const TensorRef& arena, const TensorRef& ids);
void convert_layout(const KvCache& target, const KvCache& source, const TensorRef& ids);
void convert_fp8(const TensorRef& target, const TensorRef& source, float scale, const std::string& type);

}  // namespace octavo::check
