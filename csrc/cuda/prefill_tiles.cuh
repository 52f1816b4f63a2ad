// Sizes of paged prefill (see prefill_mma.cuh), and how its tiles of keys and values come into shared memory.
#pragma once

#include "attention.cuh"
#include "tile.cuh"

namespace octavo::cuda {

constexpr int kPrefillThreads = 128;
constexpr int kPrefillRows = 64;

template <typename T, template <typename> class KindOf, int kDim>
struct Prefill {
    using Kind = KindOf<T>;
    static constexpr int kKeys = kDim == 256 ? 32 : 64;  // of a tile
    static constexpr int kRowBytes = kDim * Kind::kBytes;
    static constexpr int kTileBytes = kKeys * kRowBytes;
    static constexpr int kPieces = kRowBytes / 16;
    static constexpr int kLoads = kDim / (16 * Kind::kFragments);
    static constexpr int kFragments = kDim / 16;
    static constexpr int kQueryPitch = kDim + 8;  // 16-bit numbers: rows begin 4 banks apart
    // In registers; else they are read again for each tile. Scales of slots need registers, too.
    static constexpr bool kKeepQueries = kDim < 256 && !Kind::kSlotScales;
    static constexpr std::size_t kTiles = 4UL * kTileBytes;
    static constexpr std::size_t kQueries = 2UL * kPrefillRows * kQueryPitch;
    static constexpr int kScaleBytes = Kind::kSlotScales ? 4 * kKeys : 0;  // of a tile of keys and one of values
    static constexpr std::size_t kShared = kTiles + kQueries + 2UL * kScaleBytes + 16;
};

// Where the next 256 keys lie: lane l knows the block and the first slot there of the 8 keys from first + 8 l on, which
// never lie in two blocks. A block of -1: nowhere, or no key of the item is among them.
struct PageRuns {
    static constexpr int kKeys = 8 * 32;
    std::int32_t block;
    int slot;
    int first;  // key

    __device__ __forceinline__ void fill(const AttentionParams& p, const std::int32_t* table, const plan::Item& item,
                                         int from) {
        const int key = from + static_cast<int>(threadIdx.x) % 32 * 8;
        first = from;
        block = key + 8 > item.begin && key < item.end ? block_of(p, table, key) : -1;
        slot = key % p.kv.block_size;
    }
};

// Queues the copies of one tile of keys and one of values, `key` being the first. Rows outside the item become zeros
// and are not read.
template <typename P>
__device__ __forceinline__ void copy_tiles(const AttentionParams& p, const PageRuns& runs, const plan::Item& item,
                                           int key, unsigned char* keys, unsigned char* values, unsigned char* scales) {
    constexpr int kBytes = P::Kind::kBytes;
    constexpr int kRows = kPrefillThreads / P::kPieces;  // that are copied at once
    const int piece = static_cast<int>(threadIdx.x) % P::kPieces, first = static_cast<int>(threadIdx.x) / P::kPieces;
    const bool inside = piece * 16 < p.head_dim * kBytes;
    const auto side = [&](const Pages& pages) {
        return static_cast<const unsigned char*>(pages.data) + item.head * pages.head * kBytes + piece * 16;
    };
    const unsigned char *from_keys = side(p.kv.keys), *from_values = side(p.kv.values);
#pragma unroll
    for (int i = 0; i < P::kKeys / kRows; ++i) {
        const int row = first + i * kRows, run = (key - runs.first + row) / 8;
        const std::int32_t block = __shfl_sync(kAllLanes, runs.block, run);
        const int slot = __shfl_sync(kAllLanes, runs.slot, run) + row % 8;
        const bool valid = inside && block >= 0 && key + row >= item.begin && key + row < item.end;
        const auto place = [&](const Pages& pages) {
            return valid ? (block * pages.block + slot * pages.token) * kBytes : 0;
        };
        const int to = tile_offset<P::kRowBytes>(row, piece);
        copy_async16(keys + to, from_keys + place(p.kv.keys), valid);
        copy_async16(values + to, from_values + place(p.kv.values), valid);
    }
    if constexpr (P::Kind::kSlotScales) {
        if (p.scales.key_slots.data != nullptr) {  // a thread for each 8 keys, then one for each 8 values
            constexpr int kRuns = P::kKeys / 8;
            const int thread = static_cast<int>(threadIdx.x), run = (key - runs.first) / 8 + thread % kRuns;
            const std::int32_t block = __shfl_sync(kAllLanes, runs.block, run);
            const int slot = __shfl_sync(kAllLanes, runs.slot, run);
            if (thread < 2 * kRuns) {
                copy_scales(thread < kRuns ? p.scales.key_slots : p.scales.value_slots, block, item.head, slot,
                            scales + 16 * thread);
            }
        }
    }
}

}  // namespace octavo::cuda
