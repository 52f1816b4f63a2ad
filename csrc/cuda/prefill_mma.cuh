// Paged prefill on tensor cores: varlen, causal, chunked. A sequence's queries are its last tokens; the keys and values
// of this chunk are already in the cache.
//
// A tile is 64 rows of queries that share a kv head, 16 per warp. Tiles of keys and values are copied while the one
// before is worked on, and all four warps use them. The keys of few tiles with a long past are split like a decode's.
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

// Which keys a row of queries sees, block-sparse patterns apart: those from `from` to before `to`.
struct SeenKeys {
    int from, to;

    __device__ __forceinline__ SeenKeys(const AttentionParams& p, const plan::Item& item, int position) {
        from = p.score.window > 0 ? max(item.begin, position - p.score.window + 1) : item.begin;
        to = min(item.end, position + 1);
    }
};

template <typename T, template <typename> class KindOf, int kDim>
struct PrefillWarp {
    using P = Prefill<T, KindOf, kDim>;
    using Kind = typename P::Kind;

    std::uint32_t queries[P::kKeepQueries ? P::kFragments : 1][4];
    float acc[2 * P::kFragments][4];
    float maximum[2], sum[2];  // of rows g and g + 8
    Magnitude magnitude;

    __device__ __forceinline__ static void stage_queries(const AttentionParams& p, const Rows& rows, T* staged) {
        constexpr int kPieces = kDim / 8;
        for (int i = static_cast<int>(threadIdx.x); i < kPrefillRows * kPieces; i += kPrefillThreads) {
            const int r = i / kPieces, dim = i % kPieces * 8;
            Eight<T> x{};
            if (r < rows.count && dim < p.head_dim) {
                x = load_eight(rows.query<T>(p, r) + dim, p.whole_queries);
            }
            store_eight(staged + r * P::kQueryPitch + dim, x, true);
        }
    }

    __device__ __forceinline__ static void read_queries(const T* staged, int f, std::uint32_t (&q)[4]) {
        const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
        const T* mine = staged + 16 * warp * P::kQueryPitch + 16 * f;
        if constexpr (Kind::kBytes == 2) {
            load_matrices(q, mine + lane % 16 * P::kQueryPitch + lane / 16 * 8);
        } else {  // both halves of a row are neighbours
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const T* row = mine + (lane / 4 + 8 * i) * P::kQueryPitch;
                const auto both = *reinterpret_cast<const std::uint64_t*>(row + key_dim<Kind>(0, 0, lane % 4));
                q[i] = static_cast<std::uint32_t>(both);
                q[i + 2] = static_cast<std::uint32_t>(both >> 32);
            }
        }
    }

    __device__ __forceinline__ void begin(const AttentionParams& p, const T* staged) {
        magnitude.begin(Kind::kSlotScales && p.scales.key_slots.data != nullptr);
        if constexpr (P::kKeepQueries) {
#pragma unroll
            for (int f = 0; f < P::kFragments; ++f) {
                read_queries(staged, f, queries[f]);
            }
        }
#pragma unroll
        for (int n = 0; n < 2 * P::kFragments; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                acc[n][i] = 0.0F;
            }
        }
        maximum[0] = maximum[1] = kMinusInfinity;
        sum[0] = sum[1] = 0.0F;
    }

    __device__ __forceinline__ void multiply_keys(const AttentionParams& p, const T* staged, const unsigned char* tile,
                                                  float (&scores)[P::kKeys / 8][4]) {
#pragma unroll
        for (int n = 0; n < P::kKeys / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[n][i] = 0.0F;
            }
        }
#pragma unroll
        for (int load = 0; load < P::kLoads; ++load) {
            std::uint32_t read[P::kKeepQueries ? 1 : Kind::kFragments][4];
            if constexpr (!P::kKeepQueries) {
#pragma unroll
                for (int i = 0; i < Kind::kFragments; ++i) {
                    read_queries(staged, load * Kind::kFragments + i, read[i]);
                }
            }
#pragma unroll
            for (int j = 0; j < P::kKeys / 16; ++j) {
                std::uint32_t k[Kind::kFragments][4];
                key_fragments<P::kRowBytes>(Kind{}, tile, 16 * j, 2 * load, p.fp8, k);
#pragma unroll
                for (int i = 0; i < Kind::kFragments; ++i) {
                    const auto& q = P::kKeepQueries ? queries[P::kKeepQueries ? load * Kind::kFragments + i : 0]
                                                    : read[P::kKeepQueries ? 0 : i];
                    multiply_add<T>(scores[2 * j], q, k[i][0], k[i][2]);
                    multiply_add<T>(scores[2 * j + 1], q, k[i][1], k[i][3]);
                }
            }
        }
    }

    __device__ __forceinline__ static RowScore score_of(const AttentionParams& p, const plan::Item& item, int head) {
        return RowScore(p.score, head, item.head, p.num_heads, p.num_kv_heads, p.scales.key(item.head));
    }

    // The scales of slots `at` and `at` + 1 of the tile; 0 of what lies outside the item.
    template <bool kMasked>
    __device__ __forceinline__ static void read_scales(const Half* scales, const plan::Item& item, int key, int at,
                                                       float (&pair)[2]) {
        const auto both = *reinterpret_cast<const std::uint32_t*>(scales + at);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const bool there = !kMasked || (key + at + i >= item.begin && key + at + i < item.end);
            pair[i] = there ? to_float(Half{static_cast<std::uint16_t>(both >> 16 * i)}) : 0.0F;
        }
    }

    // Products become weights, and what was summed so far is rescaled. Not `kMasked`: every row sees every key of the
    // tile. plain_scale: a product times it is the score, if it is positive. `scales`: of the tile's keys, then of its
    // values, if slots have scales.
    template <bool kMasked>
    __device__ __forceinline__ void weigh(const AttentionParams& p, const plan::Item& item, const int (&heads)[2],
                                          const int (&positions)[2], float plain_scale, int key, const Half* scales,
                                          float (&scores)[P::kKeys / 8][4]) {
        const int t = static_cast<int>(threadIdx.x) % 4, first = key + 2 * t;
        float factors[2], rescale = 1.0F;
        const bool scaled = Kind::kSlotScales && p.scales.key_slots.data != nullptr;
        const Half* value_scales = scales + P::kKeys;
        if (scaled) {
            std::uint32_t largest = 0;
#pragma unroll
            for (int n = 0; n < P::kKeys / 8; ++n) {
                float of_keys[2], of_values[2];
                read_scales<kMasked>(scales, item, key, 2 * t + 8 * n, of_keys);
                read_scales<kMasked>(value_scales, item, key, 2 * t + 8 * n, of_values);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    scores[n][i] *= of_keys[i % 2];
                }
                largest = max(largest, max(bits_of(of_values[0]), bits_of(of_values[1])));
            }
            largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 1));
            largest = max(largest, __shfl_xor_sync(kAllLanes, largest, 2));
            rescale = magnitude.raise(largest);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const bool plain = plain_scale > 0.0F;
            if (!plain) {
                const RowScore row = score_of(p, item, heads[half]);
#pragma unroll
                for (int n = 0; n < P::kKeys / 4; ++n) {
                    float& score = scores[n / 2][2 * half + n % 2];
                    score = row(score, positions[half] - (first + n / 2 * 8 + n % 2));
                }
            }
            if constexpr (kMasked) {
                const SeenKeys seen(p, item, positions[half]);
                const int from = seen.from - first, to = seen.to - first;
#pragma unroll
                for (int n = 0; n < P::kKeys / 4; ++n) {
                    const int at = n / 2 * 8 + n % 2;
                    float& score = scores[n / 2][2 * half + n % 2];
                    score = at >= from && at < to ? score : kMinusInfinity;
                }
                if (p.score.vert_stride > 1) {
                    const RowScore row = score_of(p, item, heads[half]);
#pragma unroll
                    for (int n = 0; n < P::kKeys / 4; ++n) {
                        const int at = first + n / 2 * 8 + n % 2;
                        float& score = scores[n / 2][2 * half + n % 2];
                        score = row.sees(p.score, positions[half], at) ? score : kMinusInfinity;
                    }
                }
            }
            const float scale = plain ? plain_scale : 1.0F;
            float top = kMinusInfinity;
#pragma unroll
            for (int n = 0; n < P::kKeys / 4; ++n) {
                top = fmaxf(top, scores[n / 2][2 * half + n % 2]);
            }
            top = fmaxf(maximum[half], top * scale);
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
            const float base = top == kMinusInfinity ? 0.0F : top;  // so that what is not seen weighs nothing
            factors[half] = fast_exp2(maximum[half] - base);
            maximum[half] = top;
            float added = 0.0F;
#pragma unroll
            for (int n = 0; n < P::kKeys / 4; ++n) {
                float& score = scores[n / 2][2 * half + n % 2];
                score = fast_exp2(fmaf(score, scale, -base));
                added += score;
            }
            sum[half] = sum[half] * factors[half] + added;
            factors[half] *= rescale;
        }
        if (scaled) {
            const float inverse = magnitude.inverse();
#pragma unroll
            for (int n = 0; n < P::kKeys / 8; ++n) {
                float of_values[2];
                read_scales<kMasked>(value_scales, item, key, 2 * t + 8 * n, of_values);
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    scores[n][i] *= of_values[i % 2] * inverse;
                }
            }
        }
        if (__ballot_sync(kAllLanes, factors[0] != 1.0F || factors[1] != 1.0F) != 0) {
#pragma unroll
            for (int n = 0; n < 2 * P::kFragments; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    acc[n][i] *= factors[i / 2];
                }
            }
        }
    }

    __device__ __forceinline__ void multiply_values(const AttentionParams& p, const unsigned char* tile,
                                                    const float (&scores)[P::kKeys / 8][4]) {
#pragma unroll
        for (int j = 0; j < P::kKeys / 16; ++j) {
            const std::uint32_t weights[4] = {pack<T>(scores[2 * j][0], scores[2 * j][1]),
                                              pack<T>(scores[2 * j][2], scores[2 * j][3]),
                                              pack<T>(scores[2 * j + 1][0], scores[2 * j + 1][1]),
                                              pack<T>(scores[2 * j + 1][2], scores[2 * j + 1][3])};
#pragma unroll
            for (int load = 0; load < P::kLoads; ++load) {
                std::uint32_t v[Kind::kFragments][4];
                value_fragments<P::kRowBytes>(Kind{}, tile, 16 * j, 2 * load, p.fp8, v);
#pragma unroll
                for (int i = 0; i < Kind::kFragments; ++i) {
                    const int f = load * Kind::kFragments + i;
                    multiply_add<T>(acc[2 * f], weights, v[i][0], v[i][2]);
                    multiply_add<T>(acc[2 * f + 1], weights, v[i][1], v[i][3]);
                }
            }
        }
    }

    // Rows to the output if the item is the whole, else as they are to the item's partial result.
    __device__ __forceinline__ void write(const AttentionParams& p, const plan::Item& item, const Rows& rows) {
        const int warp = static_cast<int>(threadIdx.x) / 32, g = static_cast<int>(threadIdx.x) % 32 / 4;
        const int t = static_cast<int>(threadIdx.x) % 4;
        const float value_scale = p.scales.value(item.head);
        const float whole = Kind::kSlotScales ? magnitude.whole() : 1.0F;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = sum[half];
            total += __shfl_xor_sync(kAllLanes, total, 1);
            total += __shfl_xor_sync(kAllLanes, total, 2);
            const int r = 16 * warp + g + 8 * half;
            if (r >= rows.count) {
                continue;
            }
            if (item.parts > 1) {
                float* mine = partial_of(p, item, item.part, kPrefillRows);
                put(p, half, whole, mine + r * p.head_dim);
                if (t == 0) {
                    mine[kPrefillRows * p.head_dim + r] = maximum[half];
                    mine[kPrefillRows * (p.head_dim + 1) + r] = total;
                }
                continue;
            }
            const float factor = close_row(maximum[half], total, sink_of(p.score, rows.head(r)), value_scale);
            put(p, half, factor * whole, rows.out<T>(p, r));
        }
    }

    template <typename To>
    __device__ __forceinline__ void put(const AttentionParams& p, int half, float factor, To* to) {
        const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
        for (int n = 0; n < 2 * P::kFragments; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int dim = value_dim<Kind>(n / 2, n % 2, 2 * t + i);
                if (dim < p.head_dim) {
                    from_float(acc[n][2 * half + i] * factor, to[dim]);
                }
            }
        }
    }
};

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
