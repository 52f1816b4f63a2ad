// Products with plain row-major weights: a tile of rows times columns in registers, summed along k.

constexpr std::int64_t kSlabOfFloats = 512 << 10;  // bytes of inputs that the second cache keeps

template <Format kFormat>
inline F8 load_weight(const void* p, std::int64_t i) {
    if (kFormat == Format::kF32) {
        return load8(static_cast<const float*>(p) + i);
    }
    const auto* narrow = static_cast<const std::uint16_t*>(p) + i;
    return kFormat == Format::kF16 ? load8_f16(narrow) : load8_bf16(narrow);
}

// Fewer than eight, the rest zero.
template <Format kFormat>
inline F8 load_weights(const void* p, std::int64_t i, std::int64_t count) {
    if (kFormat == Format::kF32) {
        return load8_some(static_cast<const float*>(p) + i, count);
    }
    std::uint16_t some[8] = {};
    for (std::int64_t j = 0; j < count; ++j) {
        some[j] = static_cast<const std::uint16_t*>(p)[i + j];
    }
    return load_weight<kFormat>(some, 0);
}

template <Format kFormat, int kRows, int kColumns>
inline void dense_tile(const LinearJob& job, const void* rows, std::int64_t stride, std::int64_t row,
                       std::int64_t column) {
    constexpr std::int64_t kSize = kFormat == Format::kF32 ? 4 : 2;
    F8 sums[kRows][kColumns];
    const void* w[kRows];
    for (int r = 0; r < kRows; ++r) {
        w[r] = static_cast<const char*>(rows) + r * stride * kSize;
        for (int c = 0; c < kColumns; ++c) {
            sums[r][c] = zero8();
        }
    }
    const float* x = job.x + column * job.x_stride;
    const std::int64_t whole = job.weight.cols / 8 * 8, rest = job.weight.cols - whole;
    const auto add = [&](auto input, auto weight) {
        F8 inputs[kColumns];
        for (int c = 0; c < kColumns; ++c) {
            inputs[c] = input(x + c * job.x_stride);
        }
        for (int r = 0; r < kRows; ++r) {
            const F8 weights = weight(w[r]);
            for (int c = 0; c < kColumns; ++c) {
                sums[r][c] = fma8(weights, inputs[c], sums[r][c]);
            }
        }
    };
    const char* next = static_cast<const char*>(rows) + kRows * stride * kSize;  // memory in its order, a tile ahead
    if (job.next != nullptr && row + kRows >= job.weight.rows) {
        next = static_cast<const char*>(job.next);
    }
    for (std::int64_t k = 0; k < whole; k += 8) {
        for (std::int64_t line = 0; column == 0 && line < kRows * 8 * kSize; line += 64) {
            fetch_second(next + k * kRows * kSize + line);
        }
        add([k](const float* p) { return load8(p + k); }, [k](const void* p) { return load_weight<kFormat>(p, k); });
    }
    if (rest > 0) {  // in the same registers: added one by one, compilers may sum them in another order in each tile
        add([=](const float* p) { return load8_some(p + whole, rest); },
            [=](const void* p) { return load_weights<kFormat>(p, whole, rest); });
    }
    for (int r = 0; r < kRows; ++r) {
        for (int c = 0; c < kColumns; ++c) {
            float sum = sum8(sums[r][c]);
            float& y = job.y[(column + c) * job.y_stride + row + r];
            sum = job.bias ? sum + job.bias[row + r] : sum;
            y = job.accumulate ? y + sum : sum;
        }
    }
}

#if defined(__AVX512VL__)
constexpr std::int64_t kDenseColumns = 6;  // 4 x 6 sums in 32 registers
#else
constexpr std::int64_t kDenseColumns = 3;  // 4 x 3 in 16
#endif

template <Format kFormat, int kRows>
void dense_columns(const LinearJob& job, const void* rows, std::int64_t stride, std::int64_t row) {
    std::int64_t column = 0;
    for (; column + kDenseColumns <= job.columns; column += kDenseColumns) {
        dense_tile<kFormat, kRows, kDenseColumns>(job, rows, stride, row, column);
    }
#if defined(__AVX512VL__)
    if (column + 4 <= job.columns) {
        dense_tile<kFormat, kRows, 4>(job, rows, stride, row, column);
        column += 4;
    }
    if (column + 3 <= job.columns) {
        dense_tile<kFormat, kRows, 3>(job, rows, stride, row, column);
        column += 3;
    }
#endif
    if (column + 2 <= job.columns) {
        dense_tile<kFormat, kRows, 2>(job, rows, stride, row, column);
        column += 2;
    }
    if (column < job.columns) {
        dense_tile<kFormat, kRows, 1>(job, rows, stride, row, column);
    }
}

#if defined(__AVX512F__)
#include "linear_pairs.inl"
#endif

template <Format kFormat>
void dense_rows(const LinearJob& job, std::int64_t row, std::int64_t end, float* scratch) {
    constexpr std::int64_t kSize = kFormat == Format::kF32 ? 4 : 2;
#if defined(__AVX512F__)
    if (job.columns >= kFewestPaired) {
        row = paired_turn<kFormat>(job, row, end, scratch);
    }
#endif
    const std::int64_t stride = job.weight.stride, cols = job.weight.cols;
    const auto* base = static_cast<const char*>(job.weight.data);
    if (job.columns == 1) {
        for (; row + 8 <= end; row += 8) {
            dense_tile<kFormat, 8, 1>(job, base + row * stride * kSize, stride, row, 0);
        }
    }
    for (; row + 4 <= end; row += 4) {
        const char* rows = base + row * stride * kSize;
        if (kFormat == Format::kF32 || job.columns <= kDenseColumns) {
            dense_columns<kFormat, 4>(job, rows, stride, row);
            continue;
        }
        for (int r = 0; r < 4; ++r) {  // widened once for all columns
            constexpr DType kType = kFormat == Format::kF16 ? DType::kF16 : DType::kBF16;
            for (std::int64_t line = 0; line < cols * kSize; line += 64) {
                fetch_second(rows + (4 + r) * stride * kSize + line);
            }
            to_float(kType, rows + r * stride * kSize, cols, scratch + r * cols);
        }
        dense_columns<Format::kF32, 4>(job, scratch, cols, row);
    }
    for (; row < end; ++row) {
        dense_columns<kFormat, 1>(job, base + row * stride * kSize, stride, row);
    }
}

template <Format kFormat>
void packed_rows(const LinearJob& job, std::int64_t first_row, std::int64_t end_row, float* scratch) {
    if (job.weight.rounding == Rounding::kNone) {
        exact_in_panels(job.columns) ? panels_product<kFormat, 2>(job, first_row, end_row, scratch)
                                     : exact_rows<kFormat, Rows>(job, first_row, end_row, scratch);
    } else if constexpr (kFormat == Format::kBf16Pairs) {
        bf16_rows(job, first_row, end_row, scratch);
    } else if constexpr (has_row_scales(kFormat)) {
        has_8_bits(job.weight.rounding) ? scaled_rows<1>(job, first_row, end_row, scratch)
                                        : scaled_rows<2>(job, first_row, end_row, scratch);
    } else {
        const bool one = has_8_bits(job.weight.rounding);
        one ? digit_rows<kFormat, 1>(job, first_row, end_row, scratch)
            : digit_rows<kFormat, 2>(job, first_row, end_row, scratch);
    }
}

// Calls run(an integral_constant of the format).
template <int kFormat = 0, typename Run>
void with_format(Format format, const Run& run) {
    if constexpr (kFormat < kNumFormats) {
        if (format == static_cast<Format>(kFormat)) {
            return run(std::integral_constant<Format, static_cast<Format>(kFormat)>{});
        }
        with_format<kFormat + 1>(format, run);
    }
}

void linear(const LinearJob& job, std::int64_t first_row, std::int64_t end_row, float* scratch) {
    with_format(job.weight.format, [&](auto format) {
        if constexpr (format() >= Format::kQ8) {
            packed_rows<format()>(job, first_row, end_row, scratch);
        } else {
            dense_rows<format()>(job, first_row, end_row, scratch);
        }
    });
}

std::int64_t linear_scratch(const LinearJob& job) {
    if (job.weight.format < Format::kQ8) {
#if defined(__AVX512F__)
        if (job.columns >= kFewestPaired) {
            return paired_scratch(job);
        }
#endif
        return 4 * job.weight.cols;
    }
    if (job.weight.rounding == Rounding::kBf16) {
        return bf16_scratch(job);
    }
    if (job.weight.rounding != Rounding::kNone) {
        return digit_scratch(job);
    }
    return exact_in_panels(job.columns) ? panels_scratch<2>(job)
                                        : (kPanelBlocks * kBlock + job.columns * 2) * Rows::kRows;
}

constexpr std::int64_t kTurnBytes = 512 << 10;  // the second cache keeps them for all columns

// That cache keeps a slab of inputs for all rows of a turn. Where each turn lays them out anew, turns are high.
inline Division dense_division(const Weight& weight, std::int64_t columns) {
    constexpr std::int64_t kWide = 3 * kInputColumns;
    const std::int64_t fits = kSlabOfFloats / (4 * weight.cols + 1) / kWide * kWide, most = fits > 0 ? fits : kWide;
    Division by{kGroupRows, kTurnBytes / row_bytes(weight), columns < most ? columns : most};
#if defined(__AVX512F__)
    by.most_rows = columns >= kFewestPaired ? kHighTurn : by.most_rows;
#endif
    return by;
}

Division division(const Weight& weight, std::int64_t columns) {
    static_assert(kBf16TileRows % kGroupRows == 0);
    const std::int64_t most_rows = kTurnBytes / row_bytes(weight);
    if (weight.format < Format::kQ8) {
        return dense_division(weight, columns);
    }
    if (weight.format >= Format::kQ8 && weight.rounding == Rounding::kNone && exact_in_panels(columns)) {
        return panels_division(weight, columns);
    }
    if (weight.format != Format::kBf16Pairs || weight.rounding == Rounding::kNone) {
        return {has_row_scales(weight.format) ? kRowTiles * kGroupRows : kGroupRows, most_rows, columns};
    }
#if defined(OCTAVO_TILES)
    if (columns > kFewColumns) {
        return bf16_division(weight, most_rows, columns);
    }
#elif defined(OCTAVO_BF16_PANELS)
    if (bf16_in_panels(columns, weight.cols)) {
        return panels_division(weight, columns);
    }
#endif
    return {kBf16TileRows, most_rows, columns};
}

void weight_row(const Weight& weight, std::int64_t row, float* out) {
    with_format(weight.format, [&](auto format) {
        if constexpr (format() >= Format::kQ8) {
            packed_row<format()>(weight, row, out);
        } else {
            constexpr DType kTypes[] = {DType::kF32, DType::kF16, DType::kBF16};
            constexpr DType kType = kTypes[static_cast<int>(format())];
            const auto* first =
                static_cast<const char*>(weight.data) + row * weight.stride * (kType == DType::kF32 ? 4 : 2);
            to_float(kType, first, weight.cols, out);
        }
    });
}
