// Tiles of keys or values in shared memory, as the tensor cores take them: 16 tokens at a time, from 16-bit numbers or
// from 8-bit ones that become 16-bit in registers.
//
// A fragment is operand A of multiply_add for 16 tokens x 16 dimensions of keys, or 16 dimensions x 16 tokens of values
// (transposed on the way). With 8-bit numbers a lane gets four neighbours where 16-bit ones give it two and two, so
// which dimension stands where in a fragment differs; key_dim and value_dim say which. Sums over dimensions do not
// mind.
#pragma once

#include "common/numeric.cuh"
#include "common/pages.cuh"

namespace octavo::cuda {

// How elements are kept in blocks, for the tensor core kernels. kSlotScales: each slot may have a scale.
template <typename T>
struct Wide {  // T itself
    static constexpr bool kSlotScales = false;
    static constexpr int kBytes = 2;
    static constexpr int kFragments = 1;  // 16 x 16 fragments that four 8x8 matrices make
};
template <typename T>
struct Fp8 {  // E4M3 or E5M2
    static constexpr bool kSlotScales = false;
    static constexpr int kBytes = 1;
    static constexpr int kFragments = 2;
};
template <typename T>
struct Int8 {
    static constexpr bool kSlotScales = true;
    static constexpr int kBytes = 1;
    static constexpr int kFragments = 2;
};

// The scales of slots, which lie 8 at a time in 16 bytes. A key's scale multiplies its products with queries. A value's
// scale multiplies its weights, after they were summed; so that these stay in the range of float16, sums of values are
// kept divided by a power of two that the largest scale so far is at least as large as.
struct Magnitude {
    static constexpr std::uint32_t kLeast = 0x33800000U, kMost = 0x47000000U;  // 2^-24, 2^15: exponents of float16
    std::uint32_t bits;

    __device__ __forceinline__ void begin(bool scaled) { bits = scaled ? kLeast : 0x3f800000U; }
    // Takes in scales, of which `largest` has the highest exponent. Returns what sums are to be multiplied with.
    __device__ __forceinline__ float raise(std::uint32_t largest) {
        const std::uint32_t before = bits;
        bits = max(bits, min(largest & 0x7f800000U, kMost));
        return float_of(0x3f800000U - (bits - before));
    }
    __device__ __forceinline__ float whole() const { return float_of(bits); }
    __device__ __forceinline__ float inverse() const { return float_of(0x7f000000U - bits); }
};

// Queues the copy of the scales of 8 slots, of a block of -1: zeros.
__device__ __forceinline__ void copy_scales(const SlotScales& scales, std::int32_t block, int head, int slot,
                                            void* to) {
    const Half* from = scales.data;
    copy_async16(to, block < 0 ? from : from + block * scales.block + head * scales.head + slot, block >= 0);
}

// Where piece `piece` (of 16 bytes) of row `row` lies in a tile: pieces are shuffled within each 128 bytes, so that the
// same piece of 8 neighbouring rows touches all 32 banks.
template <int kRowBytes>
__device__ __forceinline__ int tile_offset(int row, int piece) {
    constexpr int kPieces = kRowBytes / 16;
    static_assert(kPieces % 2 == 0 && (kPieces >= 8 ? kPieces % 8 == 0 : kPieces == 4 || kPieces == 2));
    constexpr int kMask = kPieces >= 8 ? 7 : kPieces - 1;
    constexpr int kRowsPerLine = kPieces >= 8 ? 1 : 8 / kPieces;
    return row * kRowBytes + ((piece ^ (row / kRowsPerLine & kMask)) * 16);
}

// A pair of fp8 numbers, in the high bytes, becomes 16-bit ones; see fp8_constants.
template <typename T>
__device__ __forceinline__ std::uint32_t widen_pair(std::uint32_t x, const Fp8Constants& c) {
    const std::uint32_t size = (x & 0x7f007f00U) >> c.shift, special = (size + c.carry) & c.mask;
    const std::uint32_t kept = kIsHalf<T> ? size | special : size + special * c.factor;
    return mul2<T>(kept | (x & 0x80008000U), c.scale);
}
// The same by instructions for fp8, of the numbers in the low half. bfloat16 comes by way of float32: exactly.
template <typename T>
__device__ __forceinline__ std::uint32_t convert_pair(std::uint32_t x, const Fp8Constants& c) {
    const std::uint32_t halves = c.e5m2 ? permute_bytes(x, 0, 0x1404) : halves_of_fp8<false>(x);
    if constexpr (kIsHalf<T>) {
        return halves;
    } else {
        float low, high;
        to_floats(halves, low, high);
        return pack<T>(low, high);
    }
}
// Four bytes become two pairs of 16-bit numbers: (0, 1) and (2, 3).
template <typename T>
__device__ __forceinline__ void widen(Fp8<T>, std::uint32_t x, const Fp8Constants& c, std::uint32_t& low,
                                      std::uint32_t& high) {
    if (converts_fp8()) {
        low = convert_pair<T>(x, c);
        high = convert_pair<T>(x >> 16, c);
        return;
    }
    low = widen_pair<T>(permute_bytes(x, 0, 0x1404), c);
    high = widen_pair<T>(permute_bytes(x, 0, 0x3424), c);
}
template <typename T>
__device__ __forceinline__ void widen(Int8<T>, std::uint32_t x, const Fp8Constants&, std::uint32_t& low,
                                      std::uint32_t& high) {
    // 128 + (the low seven bits) less 128, or less 256 where the sign is set: in both types such numbers are exact.
    constexpr std::uint32_t kHigh = sizeof(T) == 2 ? 0x43434343U : 0;
    const std::uint32_t numbers = x & 0x7f7f7f7fU, signs = x & 0x80808080U;
    low = sub2<T>(permute_bytes(numbers, kHigh, 0x4140), permute_bytes(signs, kHigh, 0x4140));
    high = sub2<T>(permute_bytes(numbers, kHigh, 0x4342), permute_bytes(signs, kHigh, 0x4342));
}
template <>
__device__ __forceinline__ void widen(Int8<Half>, std::uint32_t x, const Fp8Constants&, std::uint32_t& low,
                                      std::uint32_t& high) {
    const std::uint32_t flipped = x ^ 0x80808080U;  // + 128
    low = sub2<Half>(permute_bytes(flipped, 0x64646464U, 0x4140), 0x64806480U);
    high = sub2<Half>(permute_bytes(flipped, 0x64646464U, 0x4342), 0x64806480U);
}

// An fp8 number's exponent and mantissa, moved down by `shift` under the 16-bit sign, are the number times a power of
// two, which `scale` takes back. Exact, also below the normal range. Of NaN (and infinities) alone a bit of `mask` is
// set once `carry` is added; `factor` times that bit makes their exponents the 16-bit type's highest.
inline Fp8Constants fp8_constants(bool bfloat, KvType type) {
    const bool e5m2 = type == KvType::kE5M2;
    if (bfloat) {
        return e5m2 ? Fp8Constants{3, 0x77807780U, 0x00800080U, 0x10001000U, 7, true}     // 2^112
                    : Fp8Constants{4, 0x7b807b80U, 0x00100010U, 0x08000800U, 15, false};  // 2^120
    }
    return e5m2 ? Fp8Constants{0, 0x3c003c00U, 0, 0, 1, true}                        // 1
                : Fp8Constants{1, 0x5c005c00U, 0x00800080U, 0x40004000U, 1, false};  // 256
}

// Fragments of keys `piece`, `piece` + 1 of the 16 rows from `row` on.
template <int kRowBytes, template <typename> class Kind, typename T>
__device__ __forceinline__ void key_fragments(Kind<T> kind, const unsigned char* tile, int row, int piece,
                                              const Fp8Constants& fp8, std::uint32_t (&a)[Kind<T>::kFragments][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const unsigned char* mine = tile + tile_offset<kRowBytes>(row + lane % 16, piece + lane / 16);
    if constexpr (Kind<T>::kFragments == 1) {
        load_matrices(a[0], mine);
    } else {
        std::uint32_t m[4];  // rows 0-7, rows 8-15; then those of the next piece
        load_matrices(m, mine);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            widen(kind, m[2 * i], fp8, a[i][0], a[i][2]);
            widen(kind, m[2 * i + 1], fp8, a[i][1], a[i][3]);
        }
    }
}

// The same of values, transposed: rows of a fragment are dimensions.
template <int kRowBytes, template <typename> class Kind, typename T>
__device__ __forceinline__ void value_fragments(Kind<T> kind, const unsigned char* tile, int row, int piece,
                                                const Fp8Constants& fp8, std::uint32_t (&a)[Kind<T>::kFragments][4]) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const unsigned char* mine = tile + tile_offset<kRowBytes>(row + lane % 8 + lane / 16 * 8, piece + lane / 8 % 2);
    if constexpr (Kind<T>::kFragments == 1) {
        load_matrices_transposed(a[0], mine);
    } else {
        std::uint32_t m[4];  // rows 0-7 of piece, of the next piece; rows 8-15 of both
        load_matrices_transposed(m, mine);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            widen(kind, permute_bytes(m[i], 0, 0x3120), fp8, a[i][0], a[i][1]);
            widen(kind, permute_bytes(m[i + 2], 0, 0x3120), fp8, a[i][2], a[i][3]);
        }
    }
}

// The first of two neighbouring dimensions that stand at places 2t, 2t + 1 (half 0) or 2t + 8, 2t + 9 (half 1) of a key
// fragment; t = lane % 4.
template <typename Kind>
__device__ __forceinline__ int key_dim(int fragment, int half, int t) {
    return 16 * fragment + (Kind::kBytes == 2 ? 8 * half + 2 * t : 4 * t + 2 * half);
}
// The dimension of row g (half 0) or g + 8 (half 1) of a value fragment.
template <typename Kind>
__device__ __forceinline__ int value_dim(int fragment, int half, int g) {
    return 16 * fragment + (Kind::kBytes == 2 ? 8 * half + g : 2 * g + half);
}

}  // namespace octavo::cuda
