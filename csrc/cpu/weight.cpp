#include "octavo/weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "half.h"
#include "octavo/pool.h"

namespace octavo {
namespace {

// Where the numbers of a GGUF block of 32 begin.
std::int64_t gguf_numbers(Format format) { return (has_minimums(format) ? 4 : 2) + 4 * high_bits(format); }

void check_sizes(std::int64_t rows, std::int64_t cols) {
    require(rows > 0 && rows < kMostElements, "rows", "must be positive, and no more than there is memory for");
    require(cols > 0 && cols < kMostElements, "cols", "must be positive, and no more than there is memory for");
}

void check_packed(const TensorRef& packed, Format format, std::int64_t rows, std::int64_t cols) {
    expect(packed, "packed", {packed_bytes(format, rows, cols)}, DType::kU8);
}

// A place in a packed matrix.
struct Place {
    std::uint8_t* scale;
    std::uint8_t* minimum;
    std::uint8_t* numbers;
    std::uint8_t* high;
};

Place place(std::uint8_t* packed, Format format, std::int64_t cols, std::int64_t row, std::int64_t block) {
    const std::int64_t place = row % kGroupRows;
    std::uint8_t* numbers = packed + row / kGroupRows * group_bytes(format, cols) + block * block_bytes(format);
    std::uint8_t* high = numbers + numbers_bytes(format);
    std::uint8_t* scales = high + high_bytes(format);
    return {scales + place * 2, scales + (kGroupRows + place) * 2, numbers + place * 4, high + place * 4};
}

// Four neighbouring columns, a byte each.
using Four = std::uint32_t;
constexpr Four kEach = 0x01010101;  // times a byte: that byte in each of the four
Four four(const std::uint8_t* bytes) {
    Four word;
    std::memcpy(&word, bytes, 4);
    return word;
}
Four bits(Four word, std::int64_t shift, unsigned mask) { return word >> shift & kEach * mask; }

// The fifth bits of 32 columns, of which GGUF has eight neighbours in a byte, and we have each fourth column.
Four fifth_bits(const std::uint8_t* gguf) {
    Four word = 0;
    for (unsigned column = 0; column < kBlock; ++column) {
        word |= (gguf[column / 8] >> column % 8 & 1U) << (column % 4 * 8 + column / 4);
    }
    return word;
}

// 32 signed bytes, as unsigned ones of which each is larger by 128.
void put_bytes(std::uint8_t* to, const std::uint8_t* from) {
    for (std::int64_t i = 0; i < kBlock; ++i) {
        to[i / 4 * kGroupRows * 4 + i % 4] = from[i] ^ 0x80U;
    }
}

void put_block(const Place& to, const std::uint8_t* from, Format format) {
    std::memcpy(to.scale, from, 2);
    if (has_minimums(format)) {
        const std::uint8_t sign = format == Format::kQ4Zeros ? 0x80U : 0;
        const std::uint8_t minimum[2] = {from[2], static_cast<std::uint8_t>(from[3] ^ sign)};
        std::memcpy(to.minimum, minimum, 2);
    }
    const std::uint8_t* numbers = from + gguf_numbers(format);
    if (has_bytes(format)) {
        return put_bytes(to.numbers, numbers);
    }
    for (std::int64_t piece = 0; piece < numbers_bytes(format) / (kGroupRows * 4); ++piece) {
        std::memcpy(to.numbers + piece * kGroupRows * 4, numbers + piece * 4, 4);
    }
    if (high_bits(format) == 1) {
        const Four word = fifth_bits(numbers - 4);
        std::memcpy(to.high, &word, 4);
    }
}

// Columns 4i … 4i + 3 of block `block` of a GGUF superblock.
Four numbers_at(const std::uint8_t* gguf, Format format, std::int64_t block, std::int64_t i) {
    if (format == Format::kQ6K) {
        const std::int64_t half = block / 4, quarter = block % 4;
        const Four low = four(gguf + half * 64 + quarter % 2 * 32 + 4 * i);
        const Four high = four(gguf + 128 + half * 32 + 4 * i);
        return bits(low, quarter / 2 * 4, 15) | bits(high, quarter * 2, 3) << 4;
    }
    if (format == Format::kQ3K) {
        return bits(four(gguf + 32 + block / 4 * 32 + 4 * i), block % 4 * 2, 3) | bits(four(gguf + 4 * i), block, 1)
                                                                                      << 2;
    }
    if (format == Format::kIq4Xs) {
        return bits(four(gguf + 8 + 16 * block + i % 4 * 4), i / 4 * 4, 15);
    }
    const std::uint8_t* nibbles = gguf + (format == Format::kQ5K ? 48 : 16);
    const Four low = bits(four(nibbles + block / 2 * 32 + 4 * i), block % 2 * 4, 15);
    return format == Format::kQ5K ? low | bits(four(gguf + 16 + 4 * i), block, 1) << 4 : low;
}

// The scale and the minimum of a block of Q4_K or Q5_K, 6 bits each: those of the last four blocks lie in parts.
void put_scales(const std::uint8_t* from, std::int64_t block, std::uint8_t* scale, std::uint8_t* minimum) {
    if (block < 4) {
        *scale = from[block] & 63U;
        *minimum = from[block + 4] & 63U;
    } else {
        *scale = static_cast<std::uint8_t>((from[block + 4] & 15U) | from[block - 4] >> 6 << 4);
        *minimum = static_cast<std::uint8_t>(from[block + 4] >> 4 | from[block] >> 6 << 4);
    }
}

// The scale of a block of IQ4_XS: 6 bits, minus 32; the upper two of all blocks lie in two bytes before the others.
std::uint8_t iq4_scale(const std::uint8_t* gguf, std::int64_t block) {
    const unsigned low = gguf[4 + block / 2] >> (block % 2 * 4) & 15U,
                   high = gguf[2 + block / 4] >> (block % 4 * 2) & 3U;
    return static_cast<std::uint8_t>((low | high << 4) - 32);
}

// A scale of half a block of Q3_K: 6 bits, minus 32; the upper two of all lie in four bytes behind the others.
std::uint8_t q3_scale(const std::uint8_t* gguf, std::int64_t half) {
    const unsigned low = gguf[96 + half % 8] >> (half / 8 * 4) & 15U,
                   high = gguf[104 + half % 4] >> (half / 4 * 2) & 3U;
    return static_cast<std::uint8_t>((low | high << 4) - 32);
}

// A row's GGUF superblock into `to`, which its group shares.
void put_superblock(std::uint8_t* to, std::int64_t place, const std::uint8_t* from, Format format) {
    constexpr std::int64_t kBlocks = kSuperblock / kBlock;
    const std::int64_t numbers = numbers_bytes(format), high = high_bytes(format);
    std::uint8_t* scales = to + kBlocks * (numbers + high) + place;
    std::uint8_t* steps = scales + kBlocks * scale_bytes(format) + place;
    for (std::int64_t block = 0; block < kBlocks; ++block) {
        Four words[4] = {}, high_words[2] = {};
        for (std::int64_t i = 0; i < 4; ++i) {
            const Four first = numbers_at(from, format, block, i), second = numbers_at(from, format, block, i + 4);
            if (format == Format::kQ3K) {
                words[0] |= bits(first, 0, 3) << 2 * i;
                words[1] |= bits(second, 0, 3) << 2 * i;
            } else {
                words[i] = bits(first, 0, 15) | bits(second, 0, 15) << 4;
            }
            if (high_bits(format) == 1) {
                const std::int64_t bit = shape_of(format).bits;
                high_words[0] |= bits(first, bit, 1) << i | bits(second, bit, 1) << (i + 4);
            } else {
                high_words[0] |= bits(first, 4, 3) << 2 * i;
                high_words[1] |= bits(second, 4, 3) << 2 * i;
            }
        }
        for (std::int64_t piece = 0; piece < numbers / (kGroupRows * 4); ++piece) {
            std::memcpy(to + block * numbers + (piece * kGroupRows + place) * 4, &words[piece], 4);
        }
        for (std::int64_t piece = 0; piece < high / (kGroupRows * 4); ++piece) {
            std::uint8_t* higher = to + kBlocks * numbers + block * high + piece * kGroupRows * 4;
            std::memcpy(higher + place * 4, &high_words[piece], 4);
        }
        std::uint8_t* scale = scales + block * scale_bytes(format);
        if (format == Format::kQ6K) {
            scale[0] = from[192 + 2 * block];
            scale[kGroupRows] = from[192 + 2 * block + 1];
        } else if (format == Format::kQ3K) {
            scale[0] = q3_scale(from, 2 * block);
            scale[kGroupRows] = q3_scale(from, 2 * block + 1);
        } else if (format == Format::kIq4Xs) {
            *scale = iq4_scale(from, block);
        } else {
            put_scales(from + 4, block, scale, scale + kGroupRows);
        }
    }
    std::memcpy(steps, from + (has_half_scales(format) ? shape_of(format).gguf_bytes - 2 : 0), 2);
    if (has_minimums(format)) {
        const std::uint8_t minimums[2] = {from[2], static_cast<std::uint8_t>(from[3] ^ 0x80U)};
        std::memcpy(steps + kGroupRows * 2, minimums, 2);
    }
}

// A row of kQ8Rows: its scale, and a signed byte for each column.
void put_row(std::uint8_t* group, std::int64_t place, std::int64_t cols, const std::uint8_t* from) {
    constexpr std::int64_t kBytes = block_bytes(Format::kQ8Rows);
    for (std::int64_t block = 0; block < cols / kBlock; ++block) {
        put_bytes(group + block * kBytes + place * 4, from + 4 + block * kBlock);
    }
    std::memcpy(group + cols / kBlock * kBytes + place * 4, from, 4);
}

// One block of values as GGUF's quantizer rounds it: Q8_0 by the largest magnitude, Q4_0 by the largest with its sign.
void round_block(const float* values, Format format, std::uint8_t* gguf) {
    float largest = 0;
    for (std::int64_t i = 0; i < kBlock; ++i) {
        largest = std::fabs(values[i]) > std::fabs(largest) ? values[i] : largest;
    }
    const float scale = format == Format::kQ8 ? std::fabs(largest) / 127.0F : largest / -8.0F;
    const float inverse = std::fabs(scale) < std::numeric_limits<float>::min() ? 0.0F : 1.0F / scale;
    const std::uint16_t half = float_to_half(scale);
    std::memcpy(gguf, &half, 2);
    for (std::int64_t i = 0; i < kBlock; ++i) {
        const float number = values[i] * inverse;
        if (format == Format::kQ8) {
            gguf[2 + i] = static_cast<std::uint8_t>(static_cast<std::int8_t>(std::lrint(number)));
        } else {
            const auto nibble = static_cast<unsigned>(std::min(15.0F, number + 8.5F));
            std::uint8_t& byte = gguf[2 + i % 16];
            byte = static_cast<std::uint8_t>(i < 16 ? nibble : (byte | nibble << 4));
        }
    }
}

}  // namespace

Format format_named(const char* name) {
    std::string known;
    for (int i = 0; i < kNumFormats; ++i) {
        if (std::strcmp(name, kFormats[i].name) == 0) {
            return static_cast<Format>(i);
        }
        known += i == 0 ? kFormats[i].name : std::string(", ") + kFormats[i].name;
    }
    throw ArgumentError("format", std::string(name) + " is not one of " + known);
}

const char* name_of(Format format) { return shape_of(format).name; }

std::int64_t packed_bytes(Format format, std::int64_t rows, std::int64_t cols) {
    require(format >= Format::kQ8, "format", "is not a packed one");
    check_sizes(rows, cols);
    require(cols % columns_of(format) == 0, "cols",
            has_superblocks(format) ? "must be a multiple of 256" : "must be a multiple of 32");
    return volume({(rows + kGroupRows - 1) / kGroupRows, group_bytes(format, cols)});
}

TensorRef memory_of(const Weight& weight) {
    const std::int64_t plain = (weight.rows - 1) * weight.stride + weight.cols;
    const std::int64_t bytes = weight.packed() ? packed_bytes(weight.format, weight.rows, weight.cols)
                                               : plain * (weight.format == Format::kF32 ? 4 : 2);
    TensorRef memory;
    memory.data = const_cast<void*>(weight.data);
    memory.shape[0] = bytes;
    memory.stride[0] = 1;
    memory.ndim = 1;
    memory.dtype = DType::kU8;
    return memory;
}

const char* name_of(Rounding rounding) {
    // In the order of Rounding.
    constexpr const char* kNames[] = {"float32", "15 bits", "8 bits", "bfloat16", "15 bits a token", "8 bits a token"};
    return kNames[static_cast<int>(rounding)];
}

bool takes(Format format, Rounding rounding) {
    if (rounding == Rounding::kNone || format < Format::kQ8) {
        return rounding == Rounding::kNone;
    }
    return format == Format::kBf16Pairs ? rounding == Rounding::kBf16
                                        : has_digits(rounding) && is_of_tokens(rounding) == has_row_scales(format);
}

Rounding rounding_named(const char* name, Format format) {
    if (*name == '\0') {
        return format < Format::kQ8           ? Rounding::kNone
               : format == Format::kBf16Pairs ? Rounding::kBf16
               : has_row_scales(format)       ? Rounding::kToken15Bits
                                              : Rounding::k15Bits;
    }
    for (const Rounding some : {Rounding::kNone, Rounding::k15Bits, Rounding::k8Bits, Rounding::kBf16,
                                Rounding::kToken15Bits, Rounding::kToken8Bits}) {
        if (std::strcmp(name, name_of(some)) == 0) {
            require(takes(format, some), "inputs", "are not rounded so for weights of this format");
            return some;
        }
    }
    require(false, "inputs", "must be float32, bfloat16, 15 bits, 8 bits, 15 bits a token or 8 bits a token");
    return Rounding::kNone;
}

Weight make_weight(const TensorRef& data, Format format, std::int64_t rows, std::int64_t cols, Rounding rounding) {
    if (format >= Format::kQ8) {
        check_packed(data, format, rows, cols);
        return {format, data.data, rows, cols, 0, rounding};
    }
    check_sizes(rows, cols);
    constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
    expect(data, "data", {rows, cols}, kTypes[static_cast<int>(format)]);
    return {format, data.data, rows, cols, data.stride[0], rounding};
}

void repack(const TensorRef& packed, const TensorRef& gguf, Format format, std::int64_t rows, std::int64_t cols) {
    const std::int64_t bytes = shape_of(format).gguf_bytes;
    if (bytes == 0 && !has_row_scales(format)) {
        throw ArgumentError("format", std::string(name_of(format)) + " is none that GGUF has");
    }
    check_packed(packed, format, rows, cols);
    const std::int64_t columns = columns_of(format), blocks = cols / columns;
    expect(gguf, "gguf", {rows, has_row_scales(format) ? 4 + cols : blocks * bytes}, DType::kU8);
    expect_apart(packed, "packed", {&gguf});
    auto* to = packed.as<std::uint8_t>();
    std::memset(to, 0, static_cast<std::size_t>(packed.shape[0]));
    Pool::instance().run([&](PoolThread& thread) {
        thread.each((rows + kGroupRows - 1) / kGroupRows, [&](std::int64_t group) {
            for (std::int64_t row = group * kGroupRows; row < std::min(rows, (group + 1) * kGroupRows); ++row) {
                const std::uint8_t* whole = gguf.as<std::uint8_t>() + row * gguf.stride[0];
                if (has_row_scales(format)) {
                    put_row(to + group * group_bytes(format, cols), row % kGroupRows, cols, whole);
                    continue;
                }
                for (std::int64_t block = 0; block < blocks; ++block) {
                    const std::uint8_t* from = whole + block * bytes;
                    if (columns == kBlock) {
                        put_block(place(to, format, cols, row, block), from, format);
                    } else {
                        std::uint8_t* superblock =
                            to + (group * blocks + block) * (columns / kBlock) * block_bytes(format);
                        put_superblock(superblock, row % kGroupRows, from, format);
                    }
                }
            }
        });
    });
}

void pack(const TensorRef& packed, const TensorRef& values) {
    expect(values, "values", {kAny, kAny}, DType::kBF16);
    const std::int64_t rows = values.shape[0], cols = values.shape[1], blocks = cols / kBlock;
    check_packed(packed, Format::kBf16Pairs, rows, cols);
    expect_apart(packed, "packed", {&values});
    auto* to = packed.as<std::uint8_t>();
    std::memset(to, 0, static_cast<std::size_t>(packed.shape[0]));
    Pool::instance().run([&](PoolThread& thread) {
        thread.each((rows + kGroupRows - 1) / kGroupRows, [&](std::int64_t group) {
            for (std::int64_t row = group * kGroupRows; row < std::min(rows, (group + 1) * kGroupRows); ++row) {
                const auto* from = values.as<std::uint16_t>() + row * values.stride[0];
                for (std::int64_t two = 0; two < blocks * kBlock / 2; ++two) {
                    std::uint8_t* piece = to + (group * blocks * kBlock / 2 + two) * kGroupRows * 4;
                    std::memcpy(piece + row % kGroupRows * 4, from + 2 * two, 4);
                }
            }
        });
    });
}

void quantize(const TensorRef& packed, const TensorRef& values, Format format) {
    require(format == Format::kQ8 || format == Format::kQ4, "format", "must be q8 or q4");
    expect(values, "values", {kAny, kAny}, DType::kF32);
    const std::int64_t rows = values.shape[0], cols = values.shape[1];
    check_packed(packed, format, rows, cols);
    expect_apart(packed, "packed", {&values});
    auto* to = packed.as<std::uint8_t>();
    std::memset(to, 0, static_cast<std::size_t>(packed.shape[0]));
    Pool::instance().run([&](PoolThread& thread) {
        thread.each((rows + kGroupRows - 1) / kGroupRows, [&](std::int64_t group) {
            std::uint8_t block[34];
            for (std::int64_t row = group * kGroupRows; row < std::min(rows, (group + 1) * kGroupRows); ++row) {
                const float* from = values.as<float>() + row * values.stride[0];
                for (std::int64_t i = 0; i < cols / kBlock; ++i) {
                    round_block(from + i * kBlock, format, block);
                    put_block(place(to, format, cols, row, i), block, format);
                }
            }
        });
    });
}

}  // namespace octavo
