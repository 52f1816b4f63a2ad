#include "octavo/weight.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "half.h"
#include "octavo/pool.h"

namespace octavo {
namespace {

constexpr const char* kNames[] = {"f32", "f16", "bf16", "q8", "q4", "q4_mins", "halves"};

// Bytes of one GGUF block of a format, and where its numbers begin.
std::int64_t gguf_bytes(Format format) { return format == Format::kQ8 ? 34 : format == Format::kQ4 ? 18 : 20; }
std::int64_t gguf_numbers(Format format) { return format == Format::kQ4Mins ? 4 : 2; }

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
};

Place place(std::uint8_t* packed, Format format, std::int64_t cols, std::int64_t row, std::int64_t block) {
    const std::int64_t place = row % kGroupRows, blocks = row / kGroupRows * (cols / kBlock) + block;
    std::uint8_t* numbers = packed + blocks * block_bytes(format);
    std::uint8_t* scales = numbers + numbers_bytes(format);
    return {scales + place * 2, scales + (kGroupRows + place) * 2, numbers + place * 4};
}

void put_block(const Place& to, const std::uint8_t* from, Format format) {
    std::memcpy(to.scale, from, 2);
    if (format == Format::kQ4Mins) {
        std::memcpy(to.minimum, from + 2, 2);
    }
    const std::uint8_t* numbers = from + gguf_numbers(format);
    for (std::int64_t piece = 0; piece < numbers_bytes(format) / (kGroupRows * 4); ++piece) {
        std::uint8_t* bytes = to.numbers + piece * kGroupRows * 4;
        std::memcpy(bytes, numbers + piece * 4, 4);
        for (int i = 0; format == Format::kQ8 && i < 4; ++i) {
            bytes[i] ^= 0x80U;
        }
    }
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
    for (int i = 0; i <= static_cast<int>(Format::kBf16Pairs); ++i) {
        if (std::strcmp(name, kNames[i]) == 0) {
            return static_cast<Format>(i);
        }
    }
    throw ArgumentError("format", std::string(name) + " is not one of f32, f16, bf16, q8, q4, q4_mins, halves");
}

const char* name_of(Format format) { return kNames[static_cast<int>(format)]; }

std::int64_t packed_bytes(Format format, std::int64_t rows, std::int64_t cols) {
    require(format >= Format::kQ8, "format", "is not a packed one");
    check_sizes(rows, cols);
    require(cols % kBlock == 0, "cols", "must be a multiple of 32");
    return volume({(rows + kGroupRows - 1) / kGroupRows, cols / kBlock, block_bytes(format)});
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

Weight make_weight(const TensorRef& data, Format format, std::int64_t rows, std::int64_t cols, bool exact) {
    if (format >= Format::kQ8) {
        check_packed(data, format, rows, cols);
        return {format, data.data, rows, cols, 0, exact};
    }
    check_sizes(rows, cols);
    constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
    expect(data, "data", {rows, cols}, kTypes[static_cast<int>(format)]);
    return {format, data.data, rows, cols, data.stride[0], exact};
}

void repack(const TensorRef& packed, const TensorRef& gguf, Format format, std::int64_t rows, std::int64_t cols) {
    require(format == Format::kQ8 || format == Format::kQ4 || format == Format::kQ4Mins, "format",
            "must be q8, q4 or q4_mins");
    check_packed(packed, format, rows, cols);
    const std::int64_t blocks = cols / kBlock, bytes = gguf_bytes(format);
    expect(gguf, "gguf", {rows, blocks * bytes}, DType::kU8);
    expect_apart(packed, "packed", {&gguf});
    auto* to = packed.as<std::uint8_t>();
    std::memset(to, 0, static_cast<std::size_t>(packed.shape[0]));
    Pool::instance().run([&](PoolThread& thread) {
        thread.each((rows + kGroupRows - 1) / kGroupRows, [&](std::int64_t group) {
            for (std::int64_t row = group * kGroupRows; row < std::min(rows, (group + 1) * kGroupRows); ++row) {
                for (std::int64_t block = 0; block < blocks; ++block) {
                    const std::uint8_t* from = gguf.as<std::uint8_t>() + row * gguf.stride[0] + block * bytes;
                    put_block(place(to, format, cols, row, block), from, format);
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
