// A matrix [rows, cols] that inputs are multiplied with: plain, or packed in blocks of 16 rows x 32 columns.
//
// A packed matrix is a run of row groups (16 rows; the last one padded with zeros), and a group is a run of blocks, so
// that a product reads one stream. A block is its numbers, then their higher bits, then 16 scales, then 16 minimums
// where the format has them (float16 both). Numbers come in pieces of 64 bytes: bytes 4r … 4r + 3 of a piece are four
// neighbouring columns of row r, so that rows fill registers and no sum is ever taken across one.
//   kQ8: 8 pieces, byte = number + 128; value = scale * number
//   kQ4: 4 pieces, low nibbles are columns 4j …, high nibbles columns 16 + 4j …; value = scale * (nibble - 8)
//   kQ4Mins: the same; value = scale * nibble + minimum
//   kQ4Zeros: the same; value = scale * (nibble - zero), and minus the zero lies where kQ4Mins has its minimum, because
//         a product of scale and zero has up to 15 bits, and float16 has 11
//   kMxfp4: the same nibbles, codes of numbers (kMxfp4Numbers): twice those of OCP's E2M1, which are whole; value =
//         scale * number, so that float16 holds MXFP4's scales from 2^-23 to 2^16
//   kIq4Nl: the same nibbles, codes of kIq4Numbers; value = scale * number
//   kQ5: nibbles as kQ4 has them, and a piece of higher bits: bit i of byte 4r + j is bit 4 of row r's column 4i + j;
//         value = scale * (number - 16)
//   kQ5Mins: the same; value = scale * number + minimum
//   kBf16Pairs: 16 pieces, bytes 4r … 4r + 3 of a piece are two neighbouring columns of row r in bfloat16; no scales
//   kQ8Rows: the numbers of kQ8 without scales; behind the blocks of a group lie 16 scales of its rows (float32)
//
// kQ3K, kQ4K, kQ5K, kQ6K and kIq4Xs take 256 columns together, a superblock of eight blocks: the low bits of all blocks
// as kQ4 has them, then their higher bits, then 32 bytes of scales for each block (kIq4Xs: 16), then 16 steps
// (float16), which rows multiply their scales with.
//   kQ3K: two pieces of low bits: bits 2i and 2i + 1 of byte 4r + j of piece h are bits 0 and 1 of row r's column
//         16h + 4i + j; a piece of higher bits as kQ5 has it, of bits 2; scales as kQ6K has them;
//         value = step * scale * (number - 4)
//   kQ4K: no higher bits; 16 scales and 16 minimums, unsigned bytes; 16 more steps, of the minimums, follow the steps;
//         value = step * scale * number + step of the minimums * minimum
//   kQ5K: the same with a piece of higher bits, as kQ5 has it
//   kQ6K: two pieces of higher bits: bits 2i and 2i + 1 of byte 4r + j of piece h are bits 4 and 5 of row r's column
//         16h + 4i + j; 16 scales for columns 0 … 15 and 16 for the others, signed bytes;
//         value = step * scale * (number - 32)
//   kIq4Xs: no higher bits; 16 scales, signed bytes; value = step * scale * the number of the code (kIq4Numbers)
// All but kBf16Pairs, kQ8Rows, kQ4Zeros and kMxfp4 are GGUF's Q8_0, Q4_0, Q4_1, IQ4_NL, Q5_0, Q5_1, Q3_K, Q4_K, Q5_K,
// Q6_K and IQ4_XS in another order: repacking loses nothing.
#pragma once

#include <cstdint>

#include "octavo/tensor.h"

namespace octavo {

enum class Format : std::uint8_t {
    kF32,
    kF16,
    kBF16,
    kQ8,
    kQ4,
    kQ4Mins,
    kBf16Pairs,
    kQ4Zeros,
    kMxfp4,
    kIq4Nl,
    kQ5,
    kQ5Mins,
    kQ3K,
    kQ4K,
    kQ5K,
    kQ6K,
    kIq4Xs,
    kQ8Rows
};

// By code: bit 3 is the sign.
constexpr std::int8_t kMxfp4Numbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
constexpr std::int8_t kIq4Numbers[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

// What a product rounds its inputs to: nothing; whole numbers times a scale, which the largest of 32 neighbours
// decides, with 15 or 8 bits; bfloat16; or whole numbers times a scale that the largest of all inputs of a token
// decides.
enum class Rounding : std::uint8_t { kNone, k15Bits, k8Bits, kBf16, kToken15Bits, kToken8Bits };
static constexpr bool is_of_tokens(Rounding rounding) {
    return rounding == Rounding::kToken15Bits || rounding == Rounding::kToken8Bits;
}
static constexpr bool has_8_bits(Rounding rounding) {
    return rounding == Rounding::k8Bits || rounding == Rounding::kToken8Bits;
}
static constexpr bool has_digits(Rounding rounding) {
    return rounding != Rounding::kNone && rounding != Rounding::kBf16;
}

constexpr std::int64_t kGroupRows = 16;
constexpr std::int64_t kBlock = 32;
constexpr std::int64_t kSuperblock = 8 * kBlock;

struct Weight {
    Format format = Format::kF32;
    const void* data = nullptr;
    std::int64_t rows = 0;
    std::int64_t cols = 0;
    std::int64_t stride = 0;              // plain: elements from row to row
    Rounding rounding = Rounding::kNone;  // of its inputs

    bool packed() const { return format >= Format::kQ8; }
};

// What an adapter adds to a stack's rows from `first` on: to row first + i the sum over k of low[k] * b[k, i].
//
// The matrix b, [rank, rows], is plain, but its numbers lie in the order in which products add them: [rows / 16, rank,
// 16], the last rows padded, so that its stride is a multiple of 16; in bfloat16 two neighbours of k lie side by side,
// [rows / 16, rank / 2, 16, 2], before the last one of an odd rank.
struct LoraPart {
    Weight b;
    std::int64_t first = 0;
    std::int64_t low = 0;      // the row of `a` with which its own begin
    std::int64_t skipped = 0;  // of b's numbers so many belong to rows of other ranks, which come before
};

Format format_named(const char* name);
const char* name_of(Format format);

// What a format is made of.
enum Traits : unsigned {
    kMinimums = 1,    // something is added to numbers times scale
    kHalfScales = 2,  // columns 0 … 15 of a block have a scale of their own
    kSigned = 4,      // products see each number with its sign, so that nothing is added to their sum times the scale;
                      // scales of superblocks have one, too
    kRowScales = 8    // a scale for each row, behind the blocks of its group
};
struct FormatShape {
    const char* name;
    std::int64_t gguf_bytes = 0;         // of a block that it is repacked from: one of GGUF, or formed like that
    std::int64_t columns = 1;            // packed together: a matrix has a multiple of them
    std::int64_t bits = 0;               // that each number has in the pieces of low bits
    std::int64_t high_bits = 0;          // that each number has in the pieces of higher bits
    float offset = 0;                    // by which products of unsigned bytes see numbers too large
    unsigned traits = 0;                 // of Traits
    const std::int8_t* codes = nullptr;  // the numbers that bits stand for, if not themselves
};
constexpr FormatShape kFormats[] = {
    // in the order of Format
    {"f32"},
    {"f16"},
    {"bf16"},
    {"q8", 34, kBlock, 8, 0, 128, kSigned},
    {"q4", 18, kBlock, 4, 0, 8},
    {"q4_mins", 20, kBlock, 4, 0, 0, kMinimums},
    {"halves", 0, kBlock, 16},
    {"q4_zeros", 20, kBlock, 4, 0, 0, kMinimums},
    {"mxfp4", 18, kBlock, 4, 0, 12, 0, kMxfp4Numbers},
    {"iq4_nl", 18, kBlock, 4, 0, 128, kSigned, kIq4Numbers},
    {"q5", 22, kBlock, 4, 1, 16},
    {"q5_mins", 24, kBlock, 4, 1, 0, kMinimums},
    {"q3_k", 110, kSuperblock, 2, 1, 4, kSigned | kHalfScales},
    {"q4_k", 144, kSuperblock, 4, 0, 0, kMinimums},
    {"q5_k", 176, kSuperblock, 4, 1, 0, kMinimums},
    {"q6_k", 210, kSuperblock, 4, 2, 32, kSigned | kHalfScales},
    {"iq4_xs", 136, kSuperblock, 4, 0, 128, kSigned, kIq4Numbers},
    {"q8_rows", 0, kBlock, 8, 0, 128, kSigned | kRowScales},
};
constexpr int kNumFormats = sizeof kFormats / sizeof kFormats[0];
static_assert(kNumFormats == static_cast<int>(Format::kQ8Rows) + 1);

static constexpr const FormatShape& shape_of(Format format) { return kFormats[static_cast<int>(format)]; }
static constexpr std::int64_t columns_of(Format format) { return shape_of(format).columns; }
static constexpr bool has_minimums(Format format) { return (shape_of(format).traits & kMinimums) != 0; }
static constexpr bool has_half_scales(Format format) { return (shape_of(format).traits & kHalfScales) != 0; }
static constexpr bool has_signed_numbers(Format format) { return (shape_of(format).traits & kSigned) != 0; }
static constexpr bool has_row_scales(Format format) { return (shape_of(format).traits & kRowScales) != 0; }
static constexpr bool has_bytes(Format format) { return shape_of(format).bits == 8; }
static constexpr bool has_codes(Format format) { return shape_of(format).codes != nullptr; }
static constexpr float offset_of(Format format) { return shape_of(format).offset; }
static constexpr std::int64_t high_bits(Format format) { return shape_of(format).high_bits; }
static constexpr bool has_superblocks(Format format) { return columns_of(format) == kSuperblock; }
// Bytes of a packed block's numbers, of the bits above them, of a superblock's scales for each block, of a block with
// all that belongs to it (an eighth of a superblock), and of a whole packed matrix.
static constexpr std::int64_t numbers_bytes(Format format) { return kGroupRows * kBlock / 8 * shape_of(format).bits; }
static constexpr std::int64_t high_bytes(Format format) { return kGroupRows * kBlock / 8 * high_bits(format); }
static constexpr std::int64_t scale_bytes(Format format) {
    return !has_superblocks(format) ? 0 : has_half_scales(format) || has_minimums(format) ? kGroupRows * 2 : kGroupRows;
}
static constexpr std::int64_t block_bytes(Format format) {
    const std::int64_t halves = format == Format::kBf16Pairs || has_row_scales(format) ? 0
                                : has_minimums(format)                                 ? 2
                                                                                       : 1;
    const std::int64_t ends = kGroupRows * 2 * halves * kBlock / columns_of(format);
    return numbers_bytes(format) + high_bytes(format) + scale_bytes(format) + ends;
}
// Bytes of a group of rows with so many columns.
static constexpr std::int64_t group_bytes(Format format, std::int64_t cols) {
    return cols / kBlock * block_bytes(format) + (has_row_scales(format) ? kGroupRows * 4 : 0);
}
// How many bytes a row takes; packed rows share blocks.
static inline std::int64_t row_bytes(const Weight& weight) {
    return weight.format >= Format::kQ8 ? group_bytes(weight.format, weight.cols) / kGroupRows
                                        : weight.cols * (weight.format == Format::kF32 ? 4 : 2);
}
std::int64_t packed_bytes(Format format, std::int64_t rows, std::int64_t cols);

// The memory that the weight refers to, as bytes.
TensorRef memory_of(const Weight& weight);

// What inputs can be rounded to for weights of this format, by its name: `float32` (nothing) for all, `bfloat16` for
// kBf16Pairs, `15 bits a token` and `8 bits a token` for kQ8Rows, `15 bits` and `8 bits` for other packed ones. Empty:
// float32 for plain ones, bfloat16 for kBf16Pairs, else 15 bits.
bool takes(Format format, Rounding rounding);
Rounding rounding_named(const char* name, Format format);
const char* name_of(Rounding rounding);

// The weight in `data` (uint8, packed_bytes long) or, for plain formats, in `data` [rows, cols].
Weight make_weight(const TensorRef& data, Format format, std::int64_t rows, std::int64_t cols, Rounding rounding);

// GGUF blocks, row after row, into `packed`: Q8_0 into kQ8, Q4_0 into kQ4, Q4_1 into kQ4Mins, Q5_0 into kQ5, Q5_1 into
// kQ5Mins, Q3_K into kQ3K, Q4_K into kQ4K, Q5_K into kQ5K, Q6_K into kQ6K, IQ4_NL into kIq4Nl, IQ4_XS into kIq4Xs;
// blocks like Q4_1, with the zero (float16) in place of the minimum, into kQ4Zeros; blocks like Q4_0, with codes as
// nibbles, into kMxfp4; and rows of a scale (float32) and a signed byte for each column into kQ8Rows. Nothing is
// rounded.
void repack(const TensorRef& packed, const TensorRef& gguf, Format format, std::int64_t rows, std::int64_t cols);

// Puts `values` bfloat16 [rows, cols] in the order of kBf16Pairs.
void pack(const TensorRef& packed, const TensorRef& values);

// Rounds `values` float32 [rows, cols] to kQ8 or kQ4, a scale per 32, as GGUF's own quantizer does.
void quantize(const TensorRef& packed, const TensorRef& values, Format format);

}  // namespace octavo
