// Paged prefill on tensor cores: varlen, causal, chunked. A sequence's queries are its last tokens; the keys and values
// of this chunk are already in the cache.
//
// A tile is 64 rows of queries that share a kv head, 16 per warp. Tiles of keys and values are copied while the one
// before is worked on, and all four warps use them. The keys of few tiles with a long past are split like a decode's.
#pragma once

#include "prefill_tiles.cuh"
#include "prefill_warp.cuh"

namespace octavo::cuda {

template <typename T, template <typename> class KindOf, int kDim>
__global__ void __launch_bounds__(kPrefillThreads) prefill_mma_kernel(const AttentionParams p) {
    using P = Prefill<T, KindOf, kDim>;
    unsigned char* tiles = shared_memory();  // keys, values; keys, values
    auto* staged = reinterpret_cast<T*>(tiles + P::kTiles);
    unsigned char* scales = tiles + P::kTiles + P::kQueries;
    auto* flag = reinterpret_cast<int*>(scales + 2 * P::kScaleBytes);
    const int warp = static_cast<int>(threadIdx.x) / 32, g = static_cast<int>(threadIdx.x) % 32 / 4;
    for (int i = first_item(p); i < end_item(p); ++i) {
        const plan::Item item = p.items[i];
        const Rows rows(p, item, kPrefillRows);
        if (rows.count == 0) {
            continue;
        }
        const int first = item.begin / P::kKeys * P::kKeys;
        const std::int32_t* table = p.tables + item.sequence * p.table_stride;
        PageRuns runs{};
        runs.fill(p, table, item, first);
        const auto copy = [&](int key) {
            const int turn = key / P::kKeys % 2;
            unsigned char* place = tiles + turn * 2 * P::kTileBytes;
            if (key < item.end) {
                if (key == runs.first + PageRuns::kKeys) {
                    runs.fill(p, table, item, key);
                }
                copy_tiles<P>(p, runs, item, key, place, place + P::kTileBytes, scales + turn * P::kScaleBytes);
            }
            commit_copies();
        };
        copy(first);
        PrefillWarp<T, KindOf, kDim> state;
        state.stage_queries(p, rows, staged);
        __syncthreads();
        state.begin(p, staged);
        const int row = min(16 * warp + g, rows.count - 1), other = min(16 * warp + g + 8, rows.count - 1);
        const int positions[2] = {rows.position(row), rows.position(other)};
        const int heads[2] = {rows.head(row), rows.head(other)};
        const bool plain = p.score.soft_cap <= 0.0F && p.score.alibi == nullptr;
        const float plain_scale = plain ? p.score.scale * p.scales.key(item.head) * kLog2e : 0.0F;
        // Tiles between these are seen as a whole by all rows.
        const int all_from = SeenKeys(p, item, rows.position(rows.count - 1)).from;
        const int all_to = p.score.vert_stride > 1 ? 0 : SeenKeys(p, item, rows.position(0)).to;
        for (int key = first; key < item.end; key += P::kKeys) {
            wait_copies<0>();
            __syncthreads();  // the tile is there for all, and all have done with the one before
            copy(key + P::kKeys);
            const int turn = key / P::kKeys % 2;
            const unsigned char* place = tiles + turn * 2 * P::kTileBytes;
            const auto* slot_scales = reinterpret_cast<const Half*>(scales + turn * P::kScaleBytes);
            float scores[P::kKeys / 8][4];
            state.multiply_keys(p, staged, place, scores);
            if (key >= all_from && key + P::kKeys <= all_to) {
                state.template weigh<false>(p, item, heads, positions, plain_scale, key, slot_scales, scores);
            } else {
                state.template weigh<true>(p, item, heads, positions, plain_scale, key, slot_scales, scores);
            }
            state.multiply_values(p, place + P::kTileBytes, scores);
        }
        wait_copies<0>();
        state.write(p, item, rows);
        if (item.parts > 1) {
            join_parts<T, 4>(p, item, rows, kPrefillRows, reinterpret_cast<float*>(tiles), flag);
        }
        __syncthreads();
    }
}

}  // namespace octavo::cuda
