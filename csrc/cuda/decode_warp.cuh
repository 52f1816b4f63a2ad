// What a warp of paged decode (see decode_mma.cuh) has in registers, what it computes of a tile, and how warps join.
//
// Scores S = K Q^T come out with keys as rows; weights go back in transposed (movmatrix), so O^T = V^T P^T has
// dimensions as rows and query rows as columns, and a row's factors stay in the lane that needs them.
#pragma once

#include "decode_tiles.cuh"

namespace octavo::cuda {

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

}  // namespace octavo::cuda
