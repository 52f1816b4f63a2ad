// Products of inputs and weights that are both e4m3, by the instruction for it: what `--quantization kept-a8` asks for.
//
// Inputs are rounded by a kernel of their own. In memory and in shared memory a token's are a run of pieces of 80
// bytes, one for 64 columns: the numbers, their scale (float32), and 12 bytes of zeros. Of each 16 columns, the four
// bytes from 4 t on are columns 2 t, 2 t + 1, 2 t + 8 and 2 t + 9: as lanes have them in a matrix of kE4M3. So both
// sides of a product have k in one order, which is not that of the columns; sums do not mind.
//
// The sum of each 64 columns begins at zero, in two products, and is then multiplied with both scales and added in
// float32. That is what weights with tiles of scales need. It also bounds what a device loses that keeps few bits of a
// product's sum, so matrices with one scale go this way, too. The order depends on columns alone: a token's bits are
// the same in any batch.
#pragma once

#include "common/reduce.cuh"
#include "linear.cuh"

namespace octavo::cuda {

constexpr int kFp8Bytes = kChunkColumns + 16;  // of 64 columns of a token's inputs
constexpr float kLargestE4M3 = 448.0F;

template <typename Element>
struct Fp8Weight : PackedWeight<Element, PackedFormat::kE4M3> {
    using Input = unsigned char;
    static constexpr int kTokenBytes = kFp8Bytes;

    // Operand A of multiply_add_e4m3: 16 rows, the 32 columns from 32 k on.
    __device__ __forceinline__ static void fragment(const unsigned char* chunk, int k, std::uint32_t (&a)[4]) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const auto* words = reinterpret_cast<const std::uint32_t*>(chunk) + 2 * ((2 * k + half) * 32 + lane);
            a[2 * half] = permute_bytes(words[0], words[1], 0x5410);      // of row lane / 4
            a[2 * half + 1] = permute_bytes(words[0], words[1], 0x7632);  // of the row 8 below
        }
    }
};

template <typename L, typename T>
struct LinearStep<L, Fp8Weight<T>> {
    __device__ __forceinline__ static void add(const Fp8Weight<T>& weight, const unsigned char* stage, int chunk,
                                               int token, LinearSums<L>& sums) {
        const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4, t = lane % 4;
        const unsigned char* inputs = stage + 16 * L::kWeightPieces;
        std::uint32_t x[2][L::kPairs][4];  // 32 columns of 16 tokens: two words of the first 8, then of the others
#pragma unroll
        for (int k = 0; k < 2; ++k) {
#pragma unroll
            for (int n = 0; n < L::kPairs; ++n) {
                const int row = token + 16 * n + lane / 16 * 8 + lane % 8;
                load_matrices(x[k][n], inputs + input_offset<kFp8Bytes>(row, 2 * k + lane / 8 % 2));
            }
        }
#pragma unroll
        for (int c = 0; c < L::kWarpChunks; ++c) {
            const unsigned char* numbers = stage + (chunk + c) * Fp8Weight<T>::kChunkBytes;
            const auto* scales = reinterpret_cast<const float*>(numbers + Fp8Weight<T>::kNumbers);
            std::uint32_t w[2][4];
            weight.fragment(numbers, 0, w[0]);
            weight.fragment(numbers, 1, w[1]);
#pragma unroll
            for (int n = 0; n < 2 * L::kPairs; ++n) {
                float part[4] = {};
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    multiply_add_e4m3(part, w[k], x[k][n / 2][n % 2 * 2], x[k][n / 2][n % 2 * 2 + 1]);
                }
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const unsigned char* scale = inputs + input_offset<kFp8Bytes>(token + 8 * n + 2 * t + i % 2, 4);
                    const float both = scales[g + 8 * (i / 2)] * *reinterpret_cast<const float*>(scale);
                    sums[c][n][i] = fmaf(part[i], both, sums[c][n][i]);
                }
            }
        }
    }
};

// ---- rounding inputs -----------------------------------------------------------------------------------------------

template <typename T>
struct RoundParams {
    unsigned char* out;  // [tokens, chunks, kFp8Bytes]
    const T* x;
    std::int64_t x_stride;
    int columns, chunks;
    int group;    // columns that share a scale: a multiple of 64
    float scale;  // of all; 0: the largest number of each group becomes 448
    bool whole;
};

template <typename T>
__device__ __forceinline__ Eight<T> eight_inputs(const RoundParams<T>& p, const T* x, int column) {
    return column < p.columns ? load_eight(x + column, p.whole) : Eight<T>{};
}

// A thread block for each token and group. Columns that are not there become zeros.
template <typename T>
__global__ void __launch_bounds__(kLinearThreads) round_inputs_kernel(const RoundParams<T> p) {
    const T* x = p.x + blockIdx.x * p.x_stride;
    const int step = 16 * static_cast<int>(blockDim.x), begin = static_cast<int>(blockIdx.y) * p.group;
    const int first = begin + 16 * static_cast<int>(threadIdx.x), end = min(begin + p.group, kChunkColumns * p.chunks);
    float scale = p.scale;
    if (scale == 0.0F) {
        float largest = 0.0F;
        for (int i = first; i < end; i += step) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Eight<T> some = eight_inputs(p, x, i + 8 * half);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    largest = fmaxf(largest, fabsf(to_float(some.at[j])));
                }
            }
        }
        largest = reduce_block(largest, reinterpret_cast<float*>(shared_memory()), Larger{});
        scale = fmaxf(largest / kLargestE4M3, float_of(0x00800000U));  // the least normal number: rows may be zeros
    }
    unsigned char* out = p.out + static_cast<std::int64_t>(blockIdx.x) * p.chunks * kFp8Bytes;
    for (int i = first; i < end; i += step) {
        float values[16];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const Eight<T> some = eight_inputs(p, x, i + 8 * half);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                values[j / 2 * 4 + 2 * half + j % 2] = to_float(some.at[j]) / scale;
            }
        }
        Packet<E4M3> codes;
        from_floats(values, codes.at);
        unsigned char* to = out + i / kChunkColumns * kFp8Bytes;
        uint4 bytes;
        memcpy(&bytes, &codes, sizeof bytes);
        *reinterpret_cast<uint4*>(to + i % kChunkColumns) = bytes;
        if (i % kChunkColumns == 0) {
            *reinterpret_cast<uint4*>(to + kChunkColumns) = uint4{bits_of(scale), 0, 0, 0};
        }
    }
}

}  // namespace octavo::cuda
