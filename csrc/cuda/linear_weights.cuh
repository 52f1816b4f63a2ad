// Matrices of weights as the tensor cores take them: chunks of 16 rows x 64 columns in shared memory, and from those
// the fragments (operand A of multiply_add) of 16 columns each.
#pragma once

#include "tile.cuh"

namespace octavo::cuda {

constexpr int kChunkRows = 16, kChunkColumns = 64;

// Rows of T, as models have them. Rows and columns that are not there become zeros.
template <typename Element>
struct PlainWeight {
    using T = Element;
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

}  // namespace octavo::cuda
