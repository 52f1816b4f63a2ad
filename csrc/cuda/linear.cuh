// Products of inputs and a matrix of weights: out[token, row] = sum over columns of x[token, column] w[row, column].
//
// What a token gets does not depend on which others are there, nor on how many: each number of the result is one
// accumulator of float32, to which multiply_add adds 16 columns at a time, in order, whatever the tile. So the tile may
// be chosen by how many tokens there are. Weights are the 16 rows of a product, tokens its 8 columns.
//
// A thread block stays for as long as there are tiles. What it copies runs ahead of what it multiplies by kStages - 1
// steps of 64 columns, from one tile into the next. Neighbouring tiles have the same weights and other tokens, so
// thread blocks that run at the same time share what they read of a matrix.
#pragma once

#include "linear_weights.cuh"

namespace octavo::cuda {

constexpr int kTokensTogether = 2048;  // that all weights are read for, before those of the next tokens

// How rows and tokens are divided into tiles.
struct Tiling {
    int rows, tokens;  // tiles in each direction
    int together;      // tiles of tokens

    __host__ __device__ static Tiling of(std::int64_t rows, std::int64_t tokens, int tile_rows, int tile_tokens) {
        return {static_cast<int>((rows + tile_rows - 1) / tile_rows),
                static_cast<int>((tokens + tile_tokens - 1) / tile_tokens), kTokensTogether / tile_tokens};
    }
    __host__ __device__ int count() const { return rows * tokens; }
    __device__ __forceinline__ void place(int tile, int& row, int& token) const {
        const int before = tile / (together * rows) * together, rest = tile % (together * rows);
        const int width = min(together, tokens - before);
        row = rest / width;
        token = before + rest % width;
    }
};

template <typename Weight>
struct LinearParams {
    using T = typename Weight::T;
    T* out;
    const typename Weight::Input* x;
    Weight weight;
    const T* bias;  // or null
    std::int64_t out_stride, x_stride;
    int tokens, rows, columns, x_columns;
    bool whole_out;  // two neighbours lie at a multiple of 4 bytes
    Tiling tiling;
};

// A tile of kRows x kTokens, by kRowWarps x kTokenWarps warps.
template <typename Weight, int kRows, int kTokens, int kRowWarps, int kTokenWarps, int kStages>
struct Linear {
    using T = typename Weight::T;
    static constexpr int kThreads = 32 * kRowWarps * kTokenWarps;
    static constexpr int kChunks = kRows / kChunkRows;  // of a step
    static constexpr int kWarpChunks = kChunks / kRowWarps;
    static constexpr int kPairs = kTokens / kTokenWarps / 16;                 // of 8 tokens, of a warp
    static constexpr int kWeightPieces = kChunks * Weight::kChunkBytes / 16;  // copies of a step
    static constexpr int kTokenPieces = Weight::kTokenBytes / 16;
    static constexpr int kInputPieces = kTokens * kTokenPieces;
    static constexpr int kStageBytes = 16 * (kWeightPieces + kInputPieces);
    static constexpr std::size_t kShared = std::size_t{kStages} * kStageBytes;
    static_assert(kChunks % kRowWarps == 0 && kTokens % (16 * kTokenWarps) == 0 && kTokensTogether % kTokens == 0);

    // Where a thread block is: a step of 64 columns of a tile.
    struct Cursor {
        int tile, step, row, token;

        __device__ __forceinline__ void begin(const LinearParams<Weight>& p) {
            tile = static_cast<int>(blockIdx.x);
            step = 0;
            find(p);
        }
        __device__ __forceinline__ void find(const LinearParams<Weight>& p) {
            if (there(p)) {
                p.tiling.place(tile, row, token);
                row *= kRows;
                token *= kTokens;
            }
        }
        __device__ __forceinline__ bool there(const LinearParams<Weight>& p) const { return tile < p.tiling.count(); }
        __device__ __forceinline__ bool is_last(const LinearParams<Weight>& p) const {
            return (step + 1) * kChunkColumns >= p.columns;
        }
        __device__ __forceinline__ void advance(const LinearParams<Weight>& p) {
            if (!is_last(p)) {
                ++step;
                return;
            }
            step = 0;
            tile += static_cast<int>(gridDim.x);
            find(p);
        }
    };

    // Queues the copies of a step; a group of none where there is none any more.
    __device__ __forceinline__ static void copy(const LinearParams<Weight>& p, const Cursor& at, unsigned char* stage) {
        const int thread = static_cast<int>(threadIdx.x), column = at.step * kChunkColumns;
        if (at.there(p)) {
#pragma unroll
            for (int i = thread; i < kWeightPieces; i += kThreads) {
                constexpr int kPieces = Weight::kChunkBytes / 16;
                const int chunk = i / kPieces;
                p.weight.copy(stage + chunk * Weight::kChunkBytes, at.row + chunk * kChunkRows, column, i % kPieces);
            }
            unsigned char* inputs = stage + 16 * kWeightPieces;
#pragma unroll
            for (int i = thread; i < kInputPieces; i += kThreads) {
                constexpr int kEach = 16 / static_cast<int>(sizeof(typename Weight::Input));
                const int row = i / kTokenPieces, piece = i % kTokenPieces, token = at.token + row;
                const int from = kEach * (at.step * kTokenPieces + piece);
                const bool there = token < p.tokens && from < p.x_columns;
                copy_async16(inputs + input_offset<Weight::kTokenBytes>(row, piece),
                             there ? p.x + token * p.x_stride + from : p.x, there);
            }
        }
        commit_copies();
    }
};

template <typename L>
using LinearSums = float[L::kWarpChunks][2 * L::kPairs][4];

// How a step is added: by the kind of weights.
template <typename L, typename Weight>
struct LinearStep {
    // Adds its 64 columns. chunk, token: the first of this warp in the tile.
    __device__ __forceinline__ static void add(const Weight& weight, const unsigned char* stage, int chunk, int token,
                                               LinearSums<L>& sums) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const unsigned char* inputs = stage + 16 * L::kWeightPieces;
#pragma unroll
        for (int k = 0; k < kChunkColumns / 16; ++k) {
            std::uint32_t x[L::kPairs][4];  // 16 tokens: columns 0-7 and 8-15 of the first 8, then of the others
#pragma unroll
            for (int n = 0; n < L::kPairs; ++n) {
                const int row = token + 16 * n + lane / 16 * 8 + lane % 8;
                load_matrices(x[n], inputs + input_offset<Weight::kTokenBytes>(row, 2 * k + lane / 8 % 2));
            }
#pragma unroll
            for (int c = 0; c < L::kWarpChunks; ++c) {
                std::uint32_t w[4];
                weight.fragment(stage + (chunk + c) * Weight::kChunkBytes, k, w);
#pragma unroll
                for (int n = 0; n < L::kPairs; ++n) {
                    multiply_add<typename Weight::T>(sums[c][2 * n], w, x[n][0], x[n][1]);
                    multiply_add<typename Weight::T>(sums[c][2 * n + 1], w, x[n][2], x[n][3]);
                }
            }
        }
    }
};

// What a warp adds up: its chunks of rows, and its tokens.
template <typename L, typename Weight>
struct LinearWarp {
    using T = typename Weight::T;
    LinearSums<L> sums;

    __device__ __forceinline__ static int row_warp(int row_warps) {
        return static_cast<int>(threadIdx.x) / 32 % row_warps;
    }
    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int c = 0; c < L::kWarpChunks; ++c) {
#pragma unroll
            for (int n = 0; n < 2 * L::kPairs; ++n) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sums[c][n][i] = 0.0F;
                }
            }
        }
    }
    // Rounds the sums, with the bias, and stores those of tokens and rows that are there: neighbouring rows of a token
    // come to one lane.
    __device__ __forceinline__ void store(const LinearParams<Weight>& p, int row, int token) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int c = 0; c < L::kWarpChunks; ++c) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int first = row + c * kChunkRows + 8 * half, mine = first + lane / 4;
                const float bias = p.bias != nullptr && mine < p.rows ? to_float(p.bias[mine]) : 0.0F;
#pragma unroll
                for (int n = 0; n < 2 * L::kPairs; ++n) {
                    const std::uint32_t pair =
                        transpose_matrix(pack<T>(sums[c][n][2 * half] + bias, sums[c][n][2 * half + 1] + bias));
                    const int to_token = token + 8 * n + lane / 4, to_row = first + lane % 4 * 2;
                    if (to_token < p.tokens) {
                        store_pair(p, p.out + to_token * p.out_stride + to_row, p.rows - to_row, pair);
                    }
                }
            }
        }
    }
    __device__ __forceinline__ static void store_pair(const LinearParams<Weight>& p, T* to, int left,
                                                      std::uint32_t pair) {
        if (left >= 2 && p.whole_out) {
            *reinterpret_cast<std::uint32_t*>(to) = pair;
            return;
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i < left) {
                to[i].bits = static_cast<std::uint16_t>(pair >> 16 * i);
            }
        }
    }
};

template <typename Weight, int kRows, int kTokens, int kRowWarps, int kTokenWarps, int kStages>
__global__ void __launch_bounds__(32 * kRowWarps * kTokenWarps, 1) linear_mma_kernel(const LinearParams<Weight> p) {
    using L = Linear<Weight, kRows, kTokens, kRowWarps, kTokenWarps, kStages>;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int chunk = warp % kRowWarps * L::kWarpChunks, token = warp / kRowWarps * (16 * L::kPairs);
    unsigned char* ring = shared_memory();
    typename L::Cursor ahead, at;
    ahead.begin(p);
    at.begin(p);
#pragma unroll
    for (int stage = 0; stage < kStages - 1; ++stage) {
        L::copy(p, ahead, ring + stage * L::kStageBytes);
        ahead.advance(p);
    }
    LinearWarp<L, Weight> sums;
    sums.clear();
    for (int stage = 0; at.there(p); stage = (stage + 1) % kStages) {
        wait_copies<kStages - 2>();
        __syncthreads();  // the step is there for all, and all are done with the one before
        L::copy(p, ahead, ring + (stage + kStages - 1) % kStages * L::kStageBytes);
        ahead.advance(p);
        LinearStep<L, Weight>::add(p.weight, ring + stage * L::kStageBytes, chunk, token, sums.sums);
        if (at.is_last(p)) {
            sums.store(p, at.row + chunk * kChunkRows, at.token + token);
            sums.clear();
        }
        at.advance(p);
    }
    wait_copies<0>();
}

// ---- without tensor cores ------------------------------------------------------------------------------------------

constexpr int kSimtTile = 64, kSimtColumns = 16, kLinearThreads = 256;

template <typename Element>
struct AnyWeight {
    using T = Element;
    using Input = T;
    const T* data;
    std::int64_t stride;
};

// float32, or rows that no tile can take. Each number is the sum of its products in the order of columns.
template <typename T>
__global__ void __launch_bounds__(kLinearThreads) linear_simt_kernel(const LinearParams<AnyWeight<T>> p) {
    constexpr int kPitch = kSimtTile + 4;
    auto* w = reinterpret_cast<float*>(shared_memory());
    float* x = w + kSimtColumns * kPitch;
    const int thread = static_cast<int>(threadIdx.x), mine_row = thread % 16 * 4, mine_token = thread / 16 * 4;
    for (int tile = static_cast<int>(blockIdx.x); tile < p.tiling.count(); tile += static_cast<int>(gridDim.x)) {
        int row, token;
        p.tiling.place(tile, row, token);
        row *= kSimtTile;
        token *= kSimtTile;
        float sums[4][4] = {};
        for (int column = 0; column < p.columns; column += kSimtColumns) {
            __syncthreads();
            for (int i = thread; i < kSimtTile * kSimtColumns; i += kLinearThreads) {
                const int k = i % kSimtColumns, at = i / kSimtColumns;
                const bool inside = column + k < p.columns;
                w[k * kPitch + at] = inside && row + at < p.rows
                                         ? to_float(p.weight.data[(row + at) * p.weight.stride + column + k])
                                         : 0.0F;
                x[k * kPitch + at] =
                    inside && token + at < p.tokens ? to_float(p.x[(token + at) * p.x_stride + column + k]) : 0.0F;
            }
            __syncthreads();
            const int count = min(kSimtColumns, p.columns - column);
            for (int k = 0; k < count; ++k) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        sums[i][j] += x[k * kPitch + mine_token + i] * w[k * kPitch + mine_row + j];
                    }
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int to_token = token + mine_token + i, to_row = row + mine_row + j;
                if (to_token < p.tokens && to_row < p.rows) {
                    const float bias = p.bias != nullptr ? to_float(p.bias[to_row]) : 0.0F;
                    from_float(sums[i][j] + bias, p.out[to_token * p.out_stride + to_row]);
                }
            }
        }
    }
}

}  // namespace octavo::cuda
