// Matrices of weights as the tensor cores take them: chunks of 16 rows x 64 columns in shared memory, and from those
// the fragments (operand A of multiply_add) of 16 columns each.
#pragma once

#include "tile.cuh"

namespace octavo::cuda {

constexpr int kChunkRows = 16, kChunkColumns = 64;

// Where piece `piece` (of 16 bytes) of the `row`-th token lies among inputs in shared memory. Rows of an odd number of
// pieces touch all banks by themselves.
template <int kTokenBytes>
__device__ __forceinline__ int input_offset(int row, int piece) {
    if constexpr (kTokenBytes / 16 % 2 == 1) {
        return row * kTokenBytes + 16 * piece;
    } else {
        return tile_offset<kTokenBytes>(row, piece);
    }
}

// Rows of T, as models have them. Rows and columns that are not there become zeros.
template <typename Element>
struct PlainWeight {
    using T = Element;
    using Input = T;
    static constexpr int kTokenBytes = 2 * kChunkColumns;  // of a token's inputs, of as many columns
    static constexpr int kChunkBytes = kChunkRows * kChunkColumns * 2;
    const T* data;
    std::int64_t stride;
    int rows, columns;

    // Queues the copy of 16 bytes, the `piece`-th of the chunk that begins at `row` and `column`.
    __device__ __forceinline__ void copy(unsigned char* chunk, int row, int column, int piece) const {
        const int r = piece / 8, c = piece % 8;
        const bool there = row + r < rows && column + 8 * c < columns;
        copy_async16(chunk + tile_offset<2 * kChunkColumns>(r, c),
                     there ? data + (row + r) * stride + column + 8 * c : data, there);
    }
    __device__ __forceinline__ void fragment(const unsigned char* chunk, int k, std::uint32_t (&a)[4]) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        load_matrices(a, chunk + tile_offset<2 * kChunkColumns>(lane % 16, 2 * k + lane / 16));
    }
};

// ---- in 4 and 8 bits -----------------------------------------------------------------------------------------------

// How a packed matrix has its numbers. It is a run of chunks, those of 16 rows after each other; rows and columns that
// are not there have scales of 0. Numbers lie as fragments want them: of each 16 columns every lane has its own in one
// word (kE4M3: two words), so they go from memory to registers in the order in which they are multiplied.
//   A lane's numbers, in order i: row lane / 4 + 8 (i / 2 % 2), column 2 (lane % 4) + 8 (i / 4) + i % 2
//   kQ4: 512 bytes, number i is nibble i / 2 + 4 (i % 2); 2 x 16 scales (float16), of 32 columns of each row; value =
//       scale * (nibble - 8)
//   kQ4Mins: the same, and 2 x 16 minimums (float16); value = scale * nibble + minimum
//   kE4M3: 1024 bytes, number i is byte i; 16 scales (float32), of each row; value = scale * number
// A value is computed in float32 and rounded once to the type of the inputs: it is what decoding the matrix gives, so a
// product has the bits of PlainWeight's with the decoded matrix.
enum class PackedFormat { kQ4, kQ4Mins, kE4M3 };

constexpr int packed_numbers(PackedFormat format) { return format == PackedFormat::kE4M3 ? 1024 : 512; }
constexpr int packed_chunk_bytes(PackedFormat format) {
    return packed_numbers(format) + (format == PackedFormat::kQ4Mins ? 128 : 64);
}

template <typename Element, PackedFormat kFormat>
struct PackedWeight {
    using T = Element;
    using Input = T;
    static constexpr int kTokenBytes = 2 * kChunkColumns;
    static constexpr int kChunkBytes = packed_chunk_bytes(kFormat), kNumbers = packed_numbers(kFormat);
    const unsigned char* data;
    int rows, columns;

    __device__ __forceinline__ void copy(unsigned char* chunk, int row, int column, int piece) const {
        const bool there = row < rows;
        const std::int64_t chunks = (columns + kChunkColumns - 1) / kChunkColumns;
        const std::int64_t number = row / kChunkRows * chunks + column / kChunkColumns;
        copy_async16(chunk + 16 * piece, there ? data + number * kChunkBytes + 16 * piece : data, there);
    }
    __device__ __forceinline__ void fragment(const unsigned char* chunk, int k, std::uint32_t (&a)[4]) const {
        const int lane = static_cast<int>(threadIdx.x) % 32, g = lane / 4;
        float values[8];  // in the order of the lane's numbers
        read(chunk + (k * 32 + lane) * (kNumbers / 128), values);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = g + 8 * half;
            float scale, minimum = 0.0F;
            if constexpr (kFormat == PackedFormat::kE4M3) {
                scale = reinterpret_cast<const float*>(chunk + kNumbers)[row];
            } else {
                const auto* scales = reinterpret_cast<const Half*>(chunk + kNumbers) + k / 2 * kChunkRows;
                scale = to_float(scales[row]);
                if constexpr (kFormat == PackedFormat::kQ4Mins) {
                    minimum = to_float(scales[2 * kChunkRows + row]);
                }
            }
#pragma unroll
            for (int columns8 = 0; columns8 < 2; ++columns8) {
                const int i = 4 * columns8 + 2 * half;
                const float low = values[i] * scale, high = values[i + 1] * scale;  // exact with 4 bits
                a[half + 2 * columns8] =
                    kFormat == PackedFormat::kQ4Mins ? pack<T>(low + minimum, high + minimum) : pack<T>(low, high);
            }
        }
    }

  private:
    __device__ __forceinline__ static void read(const unsigned char* numbers, float (&values)[8]) {
        if constexpr (kFormat == PackedFormat::kE4M3) {
            E4M3 bytes[8];
            const std::uint64_t all = *reinterpret_cast<const std::uint64_t*>(numbers);
            memcpy(bytes, &all, sizeof bytes);
            to_floats(bytes, values);
        } else {
            // 1024 + the nibble as float16, from which 1024, or 1032, is taken away exactly.
            constexpr std::uint32_t kOffset = kFormat == PackedFormat::kQ4Mins ? 0x64006400U : 0x64086408U;
            const std::uint32_t word = *reinterpret_cast<const std::uint32_t*>(numbers);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                to_floats(sub2<Half>((word >> 4 * i & 0x000f000fU) | 0x64006400U, kOffset), values[2 * i],
                          values[2 * i + 1]);
            }
        }
    }
};

}  // namespace octavo::cuda
