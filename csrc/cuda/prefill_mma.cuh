// Paged prefill on tensor cores: varlen, causal, chunked. A sequence's queries are its last tokens; the keys and values
// of this chunk are already in the cache.
//
// An item is 64 rows of queries that share a kv head (tokens x heads of the group, so that grouped heads fill a tile),
// 16 per warp. Tiles of keys and values are copied while the tile before is worked on, and all four warps use them.
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
    static constexpr std::size_t kShared = kTiles + 2UL * kPrefillRows * kQueryPitch;
};

struct PrefillItem {
    int sequence, kv_head, first_row, end_row;
    int first_token, position;  // of the sequence's first query: its row, and its place in the sequence
    int begin, end;             // keys that any of the rows sees
};

__device__ __forceinline__ PrefillItem prefill_item(const AttentionParams& p, const plan::Item& item) {
    PrefillItem it;
    it.sequence = item.sequence;
    it.kv_head = item.head;
    it.first_row = item.begin;
    it.end_row = item.end;
    it.first_token = p.cu_q[item.sequence];
    it.position = p.lens[item.sequence] - (p.cu_q[item.sequence + 1] - it.first_token);
    const int first = it.position + item.begin / p.group;
    it.begin = p.score.window > 0 ? max(0, first - p.score.window + 1) : 0;
    it.end = it.position + (item.end - 1) / p.group + 1;
    return it;
}

template <typename P>
__device__ __forceinline__ void copy_keys(const AttentionParams& p, const Pages& pages, const PrefillItem& it, int key,
                                          unsigned char* tile) {
    const auto* data = static_cast<const unsigned char*>(pages.data);
    const std::int32_t* table = p.tables + it.sequence * p.table_stride;
    const int piece = static_cast<int>(threadIdx.x) % P::kPieces;
    constexpr int kRows = kPrefillThreads / P::kPieces;
    for (int row = static_cast<int>(threadIdx.x) / P::kPieces; row < P::kKeys; row += kRows) {
        const int at = key + row;
        const bool valid = at >= it.begin && at < it.end && piece * 16 < p.head_dim * P::Kind::kBytes;
        std::int64_t place = 0;
        if (valid) {
            place = pages.offset(table[at / p.kv.block_size], it.kv_head, at % p.kv.block_size) * P::Kind::kBytes +
                    piece * 16;
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

    __device__ __forceinline__ static void stage_queries(const AttentionParams& p, const PrefillItem& it, T* staged) {
        const T* from =
            static_cast<const T*>(p.queries) + it.first_token * p.query_row + it.kv_head * p.group * p.query_head;
        for (int i = static_cast<int>(threadIdx.x); i < kPrefillRows * kDim; i += kPrefillThreads) {
            const int row = it.first_row + i / kDim, dim = i % kDim;
            T x{};
            if (row < it.end_row && dim < p.head_dim) {
                x = from[row / p.group * p.query_row + row % p.group * p.query_head + dim];
            }
            staged[i / kDim * P::kQueryPitch + dim] = x;
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
                key_fragments<P::kRowBytes>(Kind{}, tile, 16 * j, 2 * load, p.byte_shift, p.byte_scale, k);
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
    __device__ __forceinline__ void weigh(const AttentionParams& p, const PrefillItem& it, const RowScore (&rows)[2],
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
                    const bool seen = all || (at >= it.begin && at <= positions[half] &&
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
                value_fragments<P::kRowBytes>(Kind{}, tile, 16 * j, 2 * load, p.byte_shift, p.byte_scale, v);
#pragma unroll
                for (int i = 0; i < Kind::kFragments; ++i) {
                    const int f = load * Kind::kFragments + i;
                    multiply_add<T>(acc[2 * f], weights, v[i][0], v[i][2]);
                    multiply_add<T>(acc[2 * f + 1], weights, v[i][1], v[i][3]);
                }
            }
        }
    }

    __device__ __forceinline__ void write(const AttentionParams& p, const PrefillItem& it) {
        const int warp = static_cast<int>(threadIdx.x) / 32, g = static_cast<int>(threadIdx.x) % 32 / 4;
        const int t = static_cast<int>(threadIdx.x) % 4;
        const float value_scale = p.scales.value(it.kv_head);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float total = sum[half];
            total += __shfl_xor_sync(kAllLanes, total, 1);
            total += __shfl_xor_sync(kAllLanes, total, 2);
            const int row = it.first_row + 16 * warp + g + 8 * half;
            if (row >= it.end_row) {
                continue;
            }
            const int head = it.kv_head * p.group + row % p.group;
            const std::int64_t token = it.first_token + row / p.group;
            float lse;
            const float factor = close_row(maximum[half], total, sink_of(p.score, head), value_scale, lse);
            T* out = static_cast<T*>(p.out) + token * p.out_row + head * p.out_head;
#pragma unroll
            for (int n = 0; n < 2 * P::kFragments; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int dim = value_dim<Kind>(n / 2, n % 2, 2 * t + i);
                    if (dim < p.head_dim) {
                        from_float(acc[n][2 * half + i] * factor, out[dim]);
                    }
                }
            }
            if (p.lse && t == 0) {
                p.lse[token * p.num_heads + head] = lse;
            }
        }
    }
};

template <typename T, template <typename> class KindOf, int kDim>
__global__ void __launch_bounds__(kPrefillThreads) prefill_mma_kernel(const AttentionParams p) {
    using P = Prefill<T, KindOf, kDim>;
    unsigned char* tiles = shared_memory();  // keys, values; keys, values
    auto* staged = reinterpret_cast<T*>(tiles + P::kTiles);
    const int warp = static_cast<int>(threadIdx.x) / 32, g = static_cast<int>(threadIdx.x) % 32 / 4;
    for (int i = p.slots[blockIdx.x]; i < p.slots[blockIdx.x + 1]; ++i) {
        const PrefillItem it = prefill_item(p, p.items[i]);
        const int first = it.begin / P::kKeys * P::kKeys;
        const auto copy = [&](int key) {
            unsigned char* place = tiles + key / P::kKeys % 2 * 2 * P::kTileBytes;
            if (key < it.end) {
                copy_keys<P>(p, p.kv.keys, it, key, place);
                copy_keys<P>(p, p.kv.values, it, key, place + P::kTileBytes);
            }
            commit_copies();
        };
        copy(first);
        PrefillWarp<T, KindOf, kDim> state;
        state.stage_queries(p, it, staged);
        __syncthreads();
        state.begin(staged);
        int positions[2];
        const int last_row = it.end_row - 1;
        const int rows[2] = {min(it.first_row + 16 * warp + g, last_row),
                             min(it.first_row + 16 * warp + g + 8, last_row)};
        positions[0] = it.position + rows[0] / p.group;
        positions[1] = it.position + rows[1] / p.group;
        const float key_scale = p.scales.key(it.kv_head);
        const RowScore row_scores[2] = {RowScore(p.score, it.kv_head * p.group + rows[0] % p.group, it.kv_head,
                                                 p.num_heads, p.num_kv_heads, key_scale),
                                        RowScore(p.score, it.kv_head * p.group + rows[1] % p.group, it.kv_head,
                                                 p.num_heads, p.num_kv_heads, key_scale)};
        const int seen_by_all =
            p.score.window > 0 || p.score.vert_stride > 1 ? 0 : it.position + it.first_row / p.group + 1;
        for (int key = first; key < it.end; key += P::kKeys) {
            wait_copies<0>();
            __syncthreads();  // the tile is there for all, and all have done with the one before
            copy(key + P::kKeys);
            const unsigned char* place = tiles + key / P::kKeys % 2 * 2 * P::kTileBytes;
            float scores[P::kKeys / 8][4];
            state.multiply_keys(p, staged, place, scores);
            state.weigh(p, it, row_scores, positions, key, key + P::kKeys <= seen_by_all, scores);
            state.multiply_values(p, place + P::kTileBytes, scores);
        }
        wait_copies<0>();
        state.write(p, it);
        __syncthreads();
    }
}

}  // namespace octavo::cuda
