// What a warp of paged prefill (see prefill_mma.cuh) has in registers, and what it computes of a tile.
#pragma once

#include "prefill_tiles.cuh"

namespace octavo::cuda {

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

}  // namespace octavo::cuda
