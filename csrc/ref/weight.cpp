#include <cmath>
#include <limits>
#include <vector>

#include "element.h"
#include "ref.h"

namespace octavo::ref {
namespace {

// A number of a superblock. The order of all it is made of is that of octavo/weight.h.
double superblock_at(const Weight& weight, std::int64_t row, std::int64_t col) {
    const Format format = weight.format;
    const std::int64_t place = row % kGroupRows, block = col % kSuperblock / kBlock, i = col % kBlock;
    const std::int64_t superblock = row / kGroupRows * (weight.cols / kSuperblock) + col / kSuperblock;
    const auto* numbers = static_cast<const std::uint8_t*>(weight.data) + superblock * 8 * block_bytes(format);
    const auto* higher = numbers + 8 * numbers_bytes(format);
    const auto* scales = higher + 8 * high_bytes(format) + block * scale_bytes(format);
    const auto* steps = higher + 8 * high_bytes(format) + 8 * scale_bytes(format);
    const double step = read(steps + place * 2, DType::kF16);
    if (format == Format::kQ3K) {
        const int low = numbers[block * 128 + i / 16 * 64 + place * 4 + i % 4] >> (i % 16 / 4 * 2) & 3;
        const int high = higher[block * 64 + place * 4 + i % 4] >> (i / 4) & 1;
        return step * static_cast<std::int8_t>(scales[i / 16 * 16 + place]) * (low + 4 * high - 4);
    }
    const int byte = numbers[block * 256 + i % 16 / 4 * 64 + place * 4 + i % 4];
    int number = i < 16 ? byte & 15 : byte >> 4;
    if (format == Format::kQ6K) {
        const int bits = higher[block * 128 + i / 16 * 64 + place * 4 + i % 4] >> (i % 16 / 4 * 2) & 3;
        return step * static_cast<std::int8_t>(scales[i / 16 * 16 + place]) * (number + 16 * bits - 32);
    }
    if (format == Format::kIq4Xs) {
        return step * static_cast<std::int8_t>(scales[place]) * kIq4Numbers[number];
    }
    if (format == Format::kQ5K) {
        number += 16 * (higher[block * 64 + place * 4 + i % 4] >> (i / 4) & 1);
    }
    return step * scales[place] * number + read(steps + (kGroupRows + place) * 2, DType::kF16) * scales[16 + place];
}

double packed_at(const Weight& weight, std::int64_t row, std::int64_t col) {
    const std::int64_t place = row % kGroupRows, i = col % kBlock;
    const auto* group =
        static_cast<const std::uint8_t*>(weight.data) + row / kGroupRows * group_bytes(weight.format, weight.cols);
    const auto* first = group + col / kBlock * block_bytes(weight.format);
    if (weight.format == Format::kBf16Pairs) {
        return read(first + i / 2 * 64 + place * 4 + i % 2 * 2, DType::kBF16);
    }
    if (has_superblocks(weight.format)) {
        return superblock_at(weight, row, col);
    }
    if (weight.format == Format::kQ8Rows) {
        const auto* scales = group + weight.cols / kBlock * block_bytes(weight.format);
        return read(scales + place * 4, DType::kF32) * (first[i / 4 * 64 + place * 4 + i % 4] - 128);
    }
    const auto* high = first + numbers_bytes(weight.format);
    const auto* scales = high + high_bytes(weight.format);
    const double scale = read(scales + place * 2, DType::kF16);
    if (weight.format == Format::kQ8) {
        return scale * (first[i / 4 * 64 + place * 4 + i % 4] - 128);
    }
    const int byte = first[i % 16 / 4 * 64 + place * 4 + i % 4];
    int number = i < 16 ? byte & 15 : byte >> 4;
    if (weight.format == Format::kMxfp4) {
        return scale * kMxfp4Numbers[number];
    }
    if (weight.format == Format::kIq4Nl) {
        return scale * kIq4Numbers[number];
    }
    if (weight.format == Format::kQ5 || weight.format == Format::kQ5Mins) {
        number += 16 * (high[place * 4 + i % 4] >> (i / 4) & 1);
    }
    if (!has_minimums(weight.format)) {
        return scale * (number - (weight.format == Format::kQ5 ? 16 : 8));
    }
    const double minimum = read(scales + (kGroupRows + place) * 2, DType::kF16);
    return scale * number + (weight.format == Format::kQ4Zeros ? scale * minimum : minimum);
}

double weight_at(const Weight& weight, std::int64_t row, std::int64_t col) {
    if (weight.packed()) {
        return packed_at(weight, row, col);
    }
    constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
    const DType dtype = kTypes[static_cast<int>(weight.format)];
    return read(static_cast<const char*>(weight.data) + (row * weight.stride + col) * size_of(dtype), dtype);
}

// Inputs as a rounded product sees them: of each `some` the largest becomes `most`, and all are whole numbers of that
// step. Where a step ends is decided in float32, as the kernels decide it.
void round_inputs(std::vector<double>& x, std::size_t some, float most) {
    for (std::size_t first = 0; first < x.size(); first += some) {
        float top = most * std::numeric_limits<float>::min();  // smaller steps have no inverse
        for (std::size_t i = first; i < first + some; ++i) {
            top = std::fmax(top, std::fabs(static_cast<float>(x[i])));
        }
        for (std::size_t i = first; i < first + some; ++i) {
            const float number = std::nearbyint(static_cast<float>(x[i]) * (most / top));
            x[i] = static_cast<double>(number) * static_cast<double>(top / most);
        }
    }
}

}  // namespace

void linear(const TensorRef& out, const TensorRef& x, const Weight& weight, const TensorRef& bias) {
    check::linear(out, x, weight, bias);
    std::vector<double> input(static_cast<std::size_t>(weight.cols));
    for (std::int64_t token = 0; token < x.shape[0]; ++token) {
        for (std::int64_t col = 0; col < weight.cols; ++col) {
            input[static_cast<std::size_t>(col)] = get(x, token, col);
        }
        if (has_digits(weight.rounding)) {
            round_inputs(input, is_of_tokens(weight.rounding) ? input.size() : kBlock,
                         has_8_bits(weight.rounding) ? 127 : 127 * 128);
        }
        if (weight.rounding == Rounding::kBf16) {
            for (double& value : input) {
                std::uint16_t narrow = 0;
                write(&narrow, DType::kBF16, value);
                value = read(&narrow, DType::kBF16);
            }
        }
        for (std::int64_t row = 0; row < weight.rows; ++row) {
            double sum = bias.given() ? get(bias, row) : 0;
            for (std::int64_t col = 0; col < weight.cols; ++col) {
                sum += weight_at(weight, row, col) * input[static_cast<std::size_t>(col)];
            }
            put(out, sum, token, row);
        }
    }
}

void weight_rows(const TensorRef& out, const Weight& weight, const TensorRef& rows) {
    check::weight_rows(out, weight, rows);
    for (std::int64_t i = 0; i < rows.shape[0]; ++i) {
        for (std::int64_t col = 0; col < weight.cols; ++col) {
            put(out, weight_at(weight, get_int(rows, i), col), i, col);
        }
    }
}

}  // namespace octavo::ref
