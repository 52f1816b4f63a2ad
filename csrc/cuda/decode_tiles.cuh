// Sizes of paged decode (see decode_mma.cuh), and how its tiles of keys and values come into shared memory.
#pragma once

#include "attention.cuh"
#include "tile.cuh"

namespace octavo::cuda {

constexpr int kDecodeThreads = 128;
constexpr int kDecodeWarps = 4;
constexpr int kTileKeys = 16;

// kDim: a head's dimensions, with zeros up to 64, 128 or 256. kGroups: columns of 8 rows of queries.
template <typename T, template <typename> class KindOf, int kDim, int kGroups>
struct Decode {
    using Kind = KindOf<T>;
    static constexpr int kRowBytes = kDim * Kind::kBytes;
    static constexpr int kTileBytes = kTileKeys * kRowBytes;
    static constexpr int kSlots = 16384 / kTileBytes > 8 ? 8 : 16384 / kTileBytes < 4 ? 4 : 16384 / kTileBytes;
    static constexpr int kPieces = kRowBytes / 16;                 // of a row
    static constexpr int kLoads = kDim / (16 * Kind::kFragments);  // times four matrices of a tile
    static constexpr int kRows = 8 * kGroups;
    static constexpr int kPitch = kDim + 4;  // of a row's results, in floats: 4 apart in banks
    static constexpr int kAtOnce = kDim < 256 && kGroups == 1 ? 3 : 2;  // blocks per processor that registers allow
    static constexpr std::size_t kRing = static_cast<std::size_t>(kDecodeWarps) * kSlots * kTileBytes;
    static constexpr std::size_t kJoin = 4UL * kDecodeWarps * kRows * kPitch;
    static constexpr std::size_t kStates = 4UL * (2 * kDecodeWarps * kRows + 2 * kRows + 4);
    static constexpr int kScaleBytes = Kind::kSlotScales ? 32 : 0;  // of a slot of the ring; a tile has two slots
    static constexpr std::size_t kScales = static_cast<std::size_t>(kDecodeWarps) * kSlots * kScaleBytes;
    static constexpr std::size_t kShared = (kRing + kScales > kJoin ? kRing + kScales : kJoin) + kStates;
};

// The pages of a warp's tiles: lane l knows the block that keys 8 (l % 2) .. of its tile 16 n + l / 2 are in, and the
// first one's slot there.
struct PageWindow {
    std::int32_t block;
    int slot;
    int first;  // tile

    __device__ __forceinline__ void fill(const AttentionParams& p, const std::int32_t* table, const plan::Item& item,
                                         int base, int tile) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int key = base + (tile + lane / 2) * kTileKeys * kDecodeWarps + lane % 2 * 8;
        first = tile;
        block = key + 8 > item.begin && key < item.end ? block_of(p, table, key) : -1;
        slot = key % p.kv.block_size;
    }
};

// Queues the copies of one tile of keys or values, whose rows 0 and 8 lie at `low` and `high` (negative: nowhere).
// Rows outside [begin, end), and those that lie nowhere, become zeros and are not read.
template <typename D>
__device__ __forceinline__ void copy_tile(const Pages& pages, int head_bytes, std::int64_t low, std::int64_t high,
                                          int key, int begin, int end, unsigned char* tile) {
    constexpr int kBytes = D::Kind::kBytes;
    static_assert(D::kPieces <= 32 && D::kPieces >= 4);
    constexpr int kAtOnce = 32 / D::kPieces;  // rows: at most 8
    const int lane = static_cast<int>(threadIdx.x) % 32, piece = lane % D::kPieces, first = lane / D::kPieces;
    const auto* data = static_cast<const unsigned char*>(pages.data) + piece * 16;
    const std::int64_t step = pages.token * (kAtOnce * kBytes);
    const unsigned char* from[2] = {data + (low + first * pages.token) * kBytes,
                                    data + (high + first * pages.token) * kBytes};
    const bool there[2] = {piece * 16 < head_bytes && low >= 0, piece * 16 < head_bytes && high >= 0};
    const int from_row = begin - key - first, to_row = end - key - first;
#pragma unroll
    for (int i = 0; i < kTileKeys / kAtOnce; ++i) {
        const int row = i * kAtOnce, half = row / 8;
        const bool valid = there[half] && row >= from_row && row < to_row;
        copy_async16(tile + tile_offset<D::kRowBytes>(first + row, piece), from[half] + row % 8 / kAtOnce * step,
                     valid);
    }
}

}  // namespace octavo::cuda
