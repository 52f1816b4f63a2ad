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
    static constexpr int kQueryPitch = kDim + 8;      // 16-bit numbers: rows begin 4 banks apart
    static constexpr bool kKeepQueries = kDim < 256;  // in registers; else they are read again for each tile
    static constexpr std::size_t kTiles = 4UL * kTileBytes;
    static constexpr std::size_t kQueries = 2UL * kPrefillRows * kQueryPitch;
    static constexpr std::size_t kShared = kTiles + kQueries + 16;
};

template <typename P>
__device__ __forceinline__ void copy_keys(const AttentionParams& p, const Pages& pages, const plan::Item& item, int key,
                                          unsigned char* tile) {
    const auto* data = static_cast<const unsigned char*>(pages.data);
    const std::int32_t* table = p.tables + item.sequence * p.table_stride;
    const int piece = static_cast<int>(threadIdx.x) % P::kPieces;
    constexpr int kRows = kPrefillThreads / P::kPieces;
    for (int row = static_cast<int>(threadIdx.x) / P::kPieces; row < P::kKeys; row += kRows) {
        const int at = key + row;
        bool valid = at >= item.begin && at < item.end && piece * 16 < p.head_dim * P::Kind::kBytes;
        std::int64_t place = 0;
        if (valid) {
            const std::int32_t block = block_of(p, table, at);
            valid = block >= 0;
            place = valid ? pages.offset(block, item.head, at % p.kv.block_size) * P::Kind::kBytes + piece * 16 : 0;
        }
        copy_async16(tile + tile_offset<P::kRowBytes>(row, piece), data + place, valid);
    }
}

template <typename T, template <typename> class KindOf, int kDim>
struct PrefillWarp {
    using P = Prefill<T, KindOf, kDim>;
    using Kind = typename P::Kind;

    std::uint32_t queries[P::kKeepQueries ? P::kFragments : 1][4];
    float acc[2 * P::kFragments][4];
    float maximum[2], sum[2];  // of rows g and g + 8

    __device__ __forceinline__ static void stage_queries(const AttentionParams& p, const Rows& rows, T* staged) {
        for (int i = static_cast<int>(threadIdx.x); i < kPrefillRows * kDim; i += kPrefillThreads) {
            const int r = i / kDim, dim = i % kDim;
            staged[r * P::kQueryPitch + dim] = r < rows.count && dim < p.head_dim ? rows.query<T>(p, r)[dim] : T{};
        }
    }

    __device__ __forceinline__ static void read_queries(const T* staged, int f, std::uint32_t (&q)[4]) {
        const int warp = static_cast<int>(threadIdx.x) / 32, g = static_cast<int>(threadIdx.x) % 32 / 4;
        const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const T* row = staged + (16 * warp + g + 8 * (i % 2)) * P::kQueryPitch;
            q[i] = *reinterpret_cast<const std::uint32_t*>(row + key_dim<Kind>(f, i / 2, t));
        }
    }

    __device__ __forceinline__ void begin(const T* staged) {
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
#pragma unroll
            for (int j = 0; j < P::kKeys / 16; ++j) {
                std::uint32_t k[Kind::kFragments][4];
                key_fragments<P::kRowBytes>(Kind{}, tile, 16 * j, 2 * load, p.fp8, k);
#pragma unroll
                for (int i = 0; i < Kind::kFragments; ++i) {
                    const int f = load * Kind::kFragments + i;
                    if constexpr (P::kKeepQueries) {
                        multiply_add<T>(scores[2 * j], queries[f], k[i][0], k[i][2]);
                        multiply_add<T>(scores[2 * j + 1], queries[f], k[i][1], k[i][3]);
                    } else {
                        std::uint32_t q[4];
                        read_queries(staged, f, q);
                        multiply_add<T>(scores[2 * j], q, k[i][0], k[i][2]);
                        multiply_add<T>(scores[2 * j + 1], q, k[i][1], k[i][3]);
                    }
                }
            }
        }
    }

    // Products become weights, and what was summed so far is rescaled. `all`: every row sees every key of the tile.
    __device__ __forceinline__ void weigh(const AttentionParams& p, const plan::Item& item, const RowScore (&rows)[2],
                                          const int (&positions)[2], int key, bool all,
                                          float (&scores)[P::kKeys / 8][4]) {
        const int t = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float top = maximum[half];
#pragma unroll
            for (int n = 0; n < P::kKeys / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int at = key + 8 * n + 2 * t + i;
                    float& score = scores[n][2 * half + i];
                    const bool seen = all || (at >= item.begin && at < item.end && at <= positions[half] &&
                                              rows[half].sees(p.score, positions[half], at));
                    score = seen ? rows[half](score, positions[half] - at) : kMinusInfinity;
                    top = fmaxf(top, score);
                }
            }
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
            top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
            const float factor = weight_of(maximum[half], top);
            maximum[half] = top;
            float added = 0.0F;
#pragma unroll
            for (int n = 0; n < P::kKeys / 8; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    scores[n][2 * half + i] = weight_of(scores[n][2 * half + i], top);
                    added += scores[n][2 * half + i];
                }
            }
            sum[half] = sum[half] * factor + added;
#pragma unroll
            for (int n = 0; n < 2 * P::kFragments; ++n) {
                acc[n][2 * half] *= factor;
                acc[n][2 * half + 1] *= factor;
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
                put(p, half, 1.0F, mine + r * p.head_dim);
                if (t == 0) {
                    mine[kPrefillRows * p.head_dim + r] = maximum[half];
                    mine[kPrefillRows * (p.head_dim + 1) + r] = total;
                }
                continue;
            }
            const float factor = close_row(maximum[half], total, sink_of(p.score, rows.head(r)), value_scale);
            put(p, half, factor, rows.out<T>(p, r));
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
    auto* flag = reinterpret_cast<int*>(tiles + P::kTiles + P::kQueries);
    const int warp = static_cast<int>(threadIdx.x) / 32, g = static_cast<int>(threadIdx.x) % 32 / 4;
    for (int i = first_item(p); i < end_item(p); ++i) {
        const plan::Item item = p.items[i];
        const Rows rows(p, item, kPrefillRows);
        if (rows.count == 0) {
            continue;
        }
        const int first = item.begin / P::kKeys * P::kKeys;
        const auto copy = [&](int key) {
            unsigned char* place = tiles + key / P::kKeys % 2 * 2 * P::kTileBytes;
            if (key < item.end) {
                copy_keys<P>(p, p.kv.keys, item, key, place);
                copy_keys<P>(p, p.kv.values, item, key, place + P::kTileBytes);
            }
            commit_copies();
        };
        copy(first);
        PrefillWarp<T, KindOf, kDim> state;
        state.stage_queries(p, rows, staged);
        __syncthreads();
        state.begin(staged);
        const int row = min(16 * warp + g, rows.count - 1), other = min(16 * warp + g + 8, rows.count - 1);
        const int positions[2] = {rows.position(row), rows.position(other)};
        const float key_scale = p.scales.key(item.head);
        const RowScore scores_of[2] = {
            RowScore(p.score, rows.head(row), item.head, p.num_heads, p.num_kv_heads, key_scale),
            RowScore(p.score, rows.head(other), item.head, p.num_heads, p.num_kv_heads, key_scale)};
        const bool masked = p.score.window > 0 || p.score.vert_stride > 1;
        const int seen_by_all = masked ? 0 : min(item.end, rows.position(0) + 1);
        for (int key = first; key < item.end; key += P::kKeys) {
            wait_copies<0>();
            __syncthreads();  // the tile is there for all, and all have done with the one before
            copy(key + P::kKeys);
            const unsigned char* place = tiles + key / P::kKeys % 2 * 2 * P::kTileBytes;
            float scores[P::kKeys / 8][4];
            state.multiply_keys(p, staged, place, scores);
            const bool all = key >= item.begin && key + P::kKeys <= seen_by_all;
            state.weigh(p, item, scores_of, positions, key, all, scores);
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
