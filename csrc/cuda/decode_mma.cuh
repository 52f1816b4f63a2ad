// Paged decode on tensor cores. Decoding reads every key and value once and does little with it, so all that matters is
// to keep many bytes on their way:
//
// - Keys are the 16 rows of a product, the rows of queries that share them (heads of a group, and a few tokens: drafts,
//   short chunks) its 8 columns: read once for all of them.
// - Each of 4 warps takes every fourth tile of 16 keys and has a ring of its own that copies run ahead in, so the loop
//   has no barrier of the block. Warps meet once, at the end of an item.
// - A warp looks up its next 16 tiles' pages with one load; a copy never waits for a page table.
#pragma once

#include "decode_tiles.cuh"
#include "decode_warp.cuh"

namespace octavo::cuda {

// A warp's tiles of an item, through its ring: keys and values by turns, kSlots - 1 copies ahead.
template <typename T, template <typename> class KindOf, int kDim, int kGroups>
__device__ __forceinline__ void decode_item(const AttentionParams& p, const plan::Item& item, const Rows& rows,
                                            DecodeWarp<T, KindOf, kDim, kGroups>& warp_state, unsigned char* ring,
                                            unsigned char* scales) {
    using D = Decode<T, KindOf, kDim, kGroups>;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int head_bytes = p.head_dim * D::Kind::kBytes;
    const std::int32_t* table = p.tables + item.sequence * p.table_stride;
    const float key_scale = p.scales.key(item.head);
    // Tiles begin at multiples of 16, so that 8 keys never lie in two blocks.
    const int base = item.begin / kTileKeys * kTileKeys + warp * kTileKeys;
    const int num_tiles = base < item.end ? (item.end - base - 1) / (kTileKeys * kDecodeWarps) + 1 : 0;
    // Tiles between these are seen as a whole by all rows.
    const int last_position = rows.position(rows.count - 1);
    const int all_from = p.score.window > 0 ? max(item.begin, last_position - p.score.window + 1) : item.begin;
    const int all_to = p.score.vert_stride > 1 ? 0 : min(item.end, rows.position(0) + 1);
    PageWindow pages{};
    pages.fill(p, table, item, base, 0);
    std::int32_t low = 0, high = 0;  // blocks of the latest tile's keys 0-7 and 8-15, and the keys' places there
    int low_slot = 0, high_slot = 0;

    const auto copy = [&](int step) {  // step 2 i: keys of tile i; 2 i + 1: its values
        const int tile = step / 2, key = base + tile * kTileKeys * kDecodeWarps;
        if (tile < num_tiles) {
            if (step % 2 == 0) {
                if (tile == pages.first + 16) {
                    pages.fill(p, table, item, base, tile);
                }
                low = __shfl_sync(kAllLanes, pages.block, 2 * (tile - pages.first));
                high = __shfl_sync(kAllLanes, pages.block, 2 * (tile - pages.first) + 1);
                low_slot = __shfl_sync(kAllLanes, pages.slot, 2 * (tile - pages.first));
                high_slot = __shfl_sync(kAllLanes, pages.slot, 2 * (tile - pages.first) + 1);
                if constexpr (D::Kind::kSlotScales) {
                    const int lane = static_cast<int>(threadIdx.x) % 32;  // of keys: 0, 1; of values: 2, 3
                    if (p.scales.key_slots.data != nullptr && lane < 4) {
                        copy_scales(lane < 2 ? p.scales.key_slots : p.scales.value_slots, lane % 2 == 0 ? low : high,
                                    item.head, lane % 2 == 0 ? low_slot : high_slot,
                                    scales + step % D::kSlots * D::kScaleBytes + 16 * lane);
                    }
                }
            }
            const Pages& side = step % 2 == 0 ? p.kv.keys : p.kv.values;
            const auto place = [&](std::int32_t block, int slot) {
                return block < 0 ? -1 : side.offset(block, item.head, slot);
            };
            copy_tile<D>(side, head_bytes, place(low, low_slot), place(high, high_slot), key, item.begin, item.end,
                         ring + step % D::kSlots * D::kTileBytes);
        }
        commit_copies();  // also an empty group: waiting counts them
    };
    // A group has arrived for all lanes; and all have done with the slot that the next copy goes to.
    const auto arrive = [&] {
        wait_copies<D::kSlots - 2>();
        __syncwarp();
    };

    for (int step = 0; step < D::kSlots - 1; ++step) {
        copy(step);
    }
    for (int tile = 0; tile < num_tiles; ++tile) {
        const int key = base + tile * kTileKeys * kDecodeWarps;
        float scores[kGroups][4];
        std::uint32_t weights[kGroups][2];
        arrive();
        copy(2 * tile + D::kSlots - 1);
        warp_state.multiply_keys(p, ring + 2 * tile % D::kSlots * D::kTileBytes, scores);
        const auto* slot_scales = reinterpret_cast<const Half*>(scales + 2 * tile % D::kSlots * D::kScaleBytes);
        const bool masked = key < all_from || key + kTileKeys > all_to;
        warp_state.weigh(p, item, key, key_scale, masked, slot_scales, scores, weights);
        arrive();
        copy(2 * tile + D::kSlots);
        warp_state.multiply_values(p, ring + (2 * tile + 1) % D::kSlots * D::kTileBytes, weights);
    }
    wait_copies<0>();
}

template <typename T, template <typename> class KindOf, int kDim, int kGroups>
__global__ void __launch_bounds__(kDecodeThreads, Decode<T, KindOf, kDim, kGroups>::kAtOnce)
    decode_mma_kernel(const AttentionParams p) {
    using D = Decode<T, KindOf, kDim, kGroups>;
    unsigned char* memory = shared_memory();
    auto* states = reinterpret_cast<float*>(memory + D::kShared - D::kStates);
    auto* flag = reinterpret_cast<int*>(states + 2 * kDecodeWarps * D::kRows + 2 * D::kRows);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    for (int i = first_item(p); i < end_item(p); ++i) {
        const plan::Item item = p.items[i];
        const Rows rows(p, item, D::kRows);
        if (rows.count == 0) {
            continue;
        }
        DecodeWarp<T, KindOf, kDim, kGroups> state;
        state.begin(p, rows);
        decode_item(p, item, rows, state, memory + warp * D::kSlots * D::kTileBytes,
                    memory + D::kRing + warp * D::kSlots * D::kScaleBytes);
        state.join(reinterpret_cast<float*>(memory), states);
        const float* joined = states + 2 * kDecodeWarps * D::kRows;
        auto* space = reinterpret_cast<float*>(memory);
        finish_item<T, 4>(p, item, rows, D::kRows, space, D::kPitch, joined, joined + D::kRows, space, flag);
        __syncthreads();
    }
}

}  // namespace octavo::cuda
