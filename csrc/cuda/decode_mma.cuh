// Paged decode on tensor cores. Decoding reads every key and value once and does little with it, so all that matters is
// to keep many bytes on their way:
//
// - Keys are the 16 rows of a product, the rows of queries that share them (heads of a group, and a few tokens: drafts,
//   short chunks) its 8 columns: read once for all of them.
// - Each of 4 warps takes every fourth tile of 16 keys and has a ring of its own that copies run ahead in, so the loop
//   has no barrier of the block. Warps meet once, at the end of an item.
// - A warp looks up its next 16 tiles' pages with one load; a copy never waits for a page table.
//
// Scores S = K Q^T come out with keys as rows; weights go back in transposed (movmatrix), so O^T = V^T P^T has
// dimensions as rows and query rows as columns, and a row's factors stay in the lane that needs them.
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

// What a warp knows of its queries: fragments, and per column pair the scores' parameters, maxima and sums.
template <typename T, template <typename> class KindOf, int kDim, int kGroups>
struct DecodeWarp {
    using D = Decode<T, KindOf, kDim, kGroups>;
    using Kind = typename D::Kind;
    static constexpr int kFragments = kDim / 16;

    std::uint32_t queries[kGroups][kFragments][2];
    float acc[kGroups][kFragments][4];
    float maximum[kGroups][2], sum[kGroups][2];
    int position[kGroups][2], head[kGroups][2];  // of the rows whose weights are here
    Magnitude magnitude;

    __device__ __forceinline__ void begin(const AttentionParams& p, const Rows& rows) {
        const int g = static_cast<int>(threadIdx.x) % 32 / 4, t = static_cast<int>(threadIdx.x) % 4;
        magnitude.begin(Kind::kSlotScales && p.scales.key_slots.data != nullptr);
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
            const T* query = rows.query<T>(p, min(8 * n + g, rows.count - 1));
#pragma unroll
            for (int f = 0; f < kFragments; ++f) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int dim = key_dim<Kind>(f, half, t);
                    queries[n][f][half] = 8 * n + g < rows.count && dim < p.head_dim
                                              ? std::uint32_t{query[dim + 1].bits} << 16 | query[dim].bits
                                              : 0;
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    acc[n][f][i] = 0.0F;
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int row = min(8 * n + 2 * t + i, rows.count - 1);
                position[n][i] = rows.position(row);
                head[n][i] = rows.head(row);
                maximum[n][i] = kMinusInfinity;
                sum[n][i] = 0.0F;
            }
        }
    }

    __device__ __forceinline__ void multiply_keys(const AttentionParams& p, const unsigned char* tile,
                                                  float (&scores)[kGroups][4]) {
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[n][i] = 0.0F;
            }
        }
#pragma unroll
        for (int load = 0; load < D::kLoads; ++load) {
            std::uint32_t a[Kind::kFragments][4];
            key_fragments<D::kRowBytes>(Kind{}, tile, 0, 2 * load, p.fp8, a);
#pragma unroll
            for (int i = 0; i < Kind::kFragments; ++i) {
#pragma unroll
                for (int n = 0; n < kGroups; ++n) {
                    const int f = load * Kind::kFragments + i;
                    multiply_add<T>(scores[n], a[i], queries[n][f][0], queries[n][f][1]);
                }
            }
        }
    }

    // Products become weights; what was summed so far is rescaled where a maximum grew. Not `masked`: every row sees
    // every key of the tile. `scales`: of the tile's keys, then of its values, if slots have scales.
    __device__ __forceinline__ void weigh(const AttentionParams& p, const plan::Item& item, int key, float key_scale,
                                          bool masked, const Half* scales, float (&scores)[kGroups][4],
                                          std::uint32_t (&weights)[kGroups][2]) {
        const int g = static_cast<int>(threadIdx.x) % 32 / 4;
        float value_scales[2] = {1.0F, 1.0F}, rescale = 1.0F;
        if constexpr (Kind::kSlotScales) {
            if (p.scales.key_slots.data != nullptr) {
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int at = key + g + 8 * half;
                    const float scale = to_float(scales[g + 8 * half]);
#pragma unroll
                    for (int n = 0; n < kGroups; ++n) {
                        scores[n][2 * half] *= scale;
                        scores[n][2 * half + 1] *= scale;
                    }
                    const bool there = at >= item.begin && at < item.end;
                    value_scales[half] = there ? to_float(scales[kTileKeys + g + 8 * half]) : 0.0F;
                }
                std::uint32_t largest = max(bits_of(value_scales[0]), bits_of(value_scales[1]));
#pragma unroll
                for (int bits = 4; bits < 32; bits *= 2) {
                    largest = max(largest, __shfl_xor_sync(kAllLanes, largest, bits));
                }
                rescale = magnitude.raise(largest);
                value_scales[0] *= magnitude.inverse();
                value_scales[1] *= magnitude.inverse();
            }
        }
        const float plain_scale = p.score.scale * key_scale * kLog2e;
        const bool plain = p.score.soft_cap <= 0.0F && p.score.alibi == nullptr && plain_scale > 0.0F;
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
            float factors[2];
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                if (masked || !plain) {
                    const RowScore row(p.score, head[n][column], item.head, p.num_heads, p.num_kv_heads, key_scale);
                    const int end = min(item.end, position[n][column] + 1);
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        const int at = key + g + 8 * half;
                        const bool seen = at >= item.begin && at < end && row.sees(p.score, position[n][column], at);
                        float& score = scores[n][2 * half + column];
                        score = seen ? plain ? score : row(score, position[n][column] - at) : kMinusInfinity;
                    }
                }
                const float scale = plain ? plain_scale : 1.0F;
                float top = fmaxf(maximum[n][column], fmaxf(scores[n][column], scores[n][2 + column]) * scale);
#pragma unroll
                for (int bits = 4; bits < 32; bits *= 2) {
                    top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, bits));
                }
                const float base = top == kMinusInfinity ? 0.0F : top;  // so that what is not seen weighs nothing
                const float factor = fast_exp2(maximum[n][column] - base);
                maximum[n][column] = top;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    scores[n][2 * half + column] = fast_exp2(fmaf(scores[n][2 * half + column], scale, -base));
                }
                sum[n][column] = sum[n][column] * factor + scores[n][column] + scores[n][2 + column];
                factors[column] = factor * rescale;
                if constexpr (Kind::kSlotScales) {
                    scores[n][column] *= value_scales[0];
                    scores[n][2 + column] *= value_scales[1];
                }
            }
            if (__ballot_sync(kAllLanes, factors[0] != 1.0F || factors[1] != 1.0F) != 0) {
#pragma unroll
                for (int f = 0; f < kFragments; ++f) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        acc[n][f][i] *= factors[i % 2];
                    }
                }
            }
            weights[n][0] = transpose_matrix(pack<T>(scores[n][0], scores[n][1]));
            weights[n][1] = transpose_matrix(pack<T>(scores[n][2], scores[n][3]));
        }
    }

    __device__ __forceinline__ void multiply_values(const AttentionParams& p, const unsigned char* tile,
                                                    const std::uint32_t (&weights)[kGroups][2]) {
#pragma unroll
        for (int load = 0; load < D::kLoads; ++load) {
            std::uint32_t a[Kind::kFragments][4];
            value_fragments<D::kRowBytes>(Kind{}, tile, 0, 2 * load, p.fp8, a);
#pragma unroll
            for (int i = 0; i < Kind::kFragments; ++i) {
#pragma unroll
                for (int n = 0; n < kGroups; ++n) {
                    multiply_add<T>(acc[n][load * Kind::kFragments + i], a[i], weights[n][0], weights[n][1]);
                }
            }
        }
    }

    // The warps' parts become one in shared memory: acc [kRows][kPitch] at `memory`, then maximum and sum.
    __device__ __forceinline__ void join(float* memory, float* states) {
        const int thread = static_cast<int>(threadIdx.x), warp = thread / 32;
        const int g = thread % 32 / 4, t = thread % 4;
        float* maxima = states;
        float* sums = states + kDecodeWarps * D::kRows;
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                float total = sum[n][column];
#pragma unroll
                for (int bits = 4; bits < 32; bits *= 2) {
                    total += __shfl_xor_sync(kAllLanes, total, bits);
                }
                if (g == 0) {
                    maxima[warp * D::kRows + 8 * n + 2 * t + column] = maximum[n][column];
                    sums[warp * D::kRows + 8 * n + 2 * t + column] = total;
                }
            }
        }
        __syncthreads();  // and no warp needs its ring any more
#pragma unroll
        for (int n = 0; n < kGroups; ++n) {
#pragma unroll
            for (int column = 0; column < 2; ++column) {
                const int at_row = 8 * n + 2 * t + column;
                float top = maxima[at_row];
#pragma unroll
                for (int other = 1; other < kDecodeWarps; ++other) {
                    top = fmaxf(top, maxima[other * D::kRows + at_row]);
                }
                const float factor =
                    weight_of(maximum[n][column], top) * (Kind::kSlotScales ? magnitude.whole() : 1.0F);
                float* row = memory + (warp * D::kRows + at_row) * D::kPitch;
#pragma unroll
                for (int f = 0; f < kFragments; ++f) {
                    row[value_dim<Kind>(f, 0, g)] = acc[n][f][column] * factor;
                    row[value_dim<Kind>(f, 1, g)] = acc[n][f][2 + column] * factor;
                }
            }
        }
        __syncthreads();
        for (int i = thread; i < D::kRows * kDim; i += kDecodeThreads) {
            const int place = i / kDim * D::kPitch + i % kDim;
            float total = memory[place];
#pragma unroll
            for (int other = 1; other < kDecodeWarps; ++other) {
                total += memory[other * D::kRows * D::kPitch + place];
            }
            memory[place] = total;
        }
        float* joined = states + 2 * kDecodeWarps * D::kRows;
        if (thread < D::kRows) {
            float top = maxima[thread], total = 0.0F;
            for (int other = 1; other < kDecodeWarps; ++other) {
                top = fmaxf(top, maxima[other * D::kRows + thread]);
            }
            for (int other = 0; other < kDecodeWarps; ++other) {
                total += weight_of(maxima[other * D::kRows + thread], top) * sums[other * D::kRows + thread];
            }
            joined[thread] = top;
            joined[D::kRows + thread] = total;
        }
        __syncthreads();
    }
};

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
