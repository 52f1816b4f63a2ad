// Products with packed weights: a register holds eight or sixteen rows (rows.inl), so each of its elements is one
// result, and no sum is taken across them. This file has what all packed products share, and those with exact inputs.

inline void put_rows(const LinearJob& job, std::int64_t column, std::int64_t row, F8 sum) {
    float* y = job.y + column * job.y_stride + row;
    const std::int64_t count = job.weight.rows - row;
    if (count >= 8) {
        sum = job.bias ? add8(sum, load8(job.bias + row)) : sum;
        store8(y, job.accumulate ? add8(load8(y), sum) : sum);
        return;
    }
    float wide[8];
    store8(wide, sum);
    for (std::int64_t i = 0; i < count; ++i) {
        const float with_bias = job.bias ? wide[i] + job.bias[row + i] : wide[i];
        y[i] = job.accumulate ? y[i] + with_bias : with_bias;
    }
}

template <typename R>
inline void put_tile(const LinearJob& job, std::int64_t column, std::int64_t row, typename R::F sum) {
    if (row + R::kRows <= job.weight.rows) {
        float* y = job.y + column * job.y_stride + row;
        sum = job.bias ? R::add(sum, R::load(job.bias + row)) : sum;
        return R::store(y, job.accumulate ? R::add(R::load(y), sum) : sum);
    }
    for (int first = 0; first < R::kRows; first += 8) {
        put_rows(job, column, row + first, R::eight(sum, first / 8));
    }
}

// Where the rows from `row` on lie in the blocks of their group. `place` is the row within its group.
template <Format kFormat>
struct Part {
    static constexpr std::int64_t kNumbers = numbers_bytes(kFormat), kBytes = block_bytes(kFormat);
    static constexpr std::int64_t kHigh = high_bytes(kFormat), kScales = scale_bytes(kFormat);
    static constexpr std::int64_t kBlocks = columns_of(kFormat) / kBlock;
    const std::uint8_t* group;
    std::int64_t place, blocks;

    Part(const Weight& weight, std::int64_t row)
        : group(static_cast<const std::uint8_t*>(weight.data) + row / kGroupRows * group_bytes(kFormat, weight.cols)),
          place(row % kGroupRows),
          blocks(weight.cols / kBlock) {}
    const std::uint8_t* numbers(std::int64_t block) const {
        return superblock(block) + block % kBlocks * kNumbers + place * 4;
    }
    const std::uint8_t* scales(std::int64_t block) const {
        return group + block * kBytes + kNumbers + kHigh + place * 2;
    }
    const std::uint8_t* minimums(std::int64_t block) const { return scales(block) + kGroupRows * 2; }
    // Where a block would begin if its superblock were blocks: what is fetched from here on misses no byte.
    const std::uint8_t* line(std::int64_t block) const { return group + block * kBytes + place * 4; }

    const std::uint8_t* high(std::int64_t block) const {
        return superblock(block) + kBlocks * kNumbers + block % kBlocks * kHigh + place * 4;
    }
    // In superblocks: scales and minimums (or the scales of both halves) in bytes, and steps.
    const std::uint8_t* byte_scales(std::int64_t block) const {
        return superblock(block) + kBlocks * (kNumbers + kHigh) + block % kBlocks * kScales + place;
    }
    // Behind all blocks: one for each row.
    const float* row_scales() const { return reinterpret_cast<const float*>(group + blocks * kBytes) + place; }
    const std::uint8_t* steps(std::int64_t block) const {
        return superblock(block) + kBlocks * (kNumbers + kHigh + kScales) + place * 2;
    }

  private:
    const std::uint8_t* superblock(std::int64_t block) const { return group + block / kBlocks * (kBlocks * kBytes); }
};

// What the numbers of a block are multiplied with, or those of its half `half`. Scales of superblocks are exact:
// products of 11 and 8 bits.
template <Format kFormat, typename R>
inline typename R::F scale_of(const Part<kFormat>& at, std::int64_t block, int half = 0) {
    if (has_row_scales(kFormat)) {
        return R::load(at.row_scales());
    }
    if (!has_superblocks(kFormat)) {
        return R::halves(at.scales(block));
    }
    if (has_signed_numbers(kFormat)) {
        return R::mul(R::halves(at.steps(block)), R::signed_bytes(at.byte_scales(block) + half * kGroupRows));
    }
    return R::mul(R::halves(at.steps(block)), R::bytes(at.byte_scales(block)));
}

// What is added to the numbers times the scale, in formats that have it. Of kQ4Zeros it is exact: a product of 11 and 4
// bits.
template <Format kFormat, typename R>
inline typename R::F minimum_of(const Part<kFormat>& at, std::int64_t block) {
    if (has_superblocks(kFormat)) {
        return R::mul(R::halves(at.steps(block) + kGroupRows * 2), R::bytes(at.byte_scales(block) + kGroupRows));
    }
    const typename R::F minimum = R::halves(at.minimums(block));
    return kFormat == Format::kQ4Zeros ? R::mul(R::halves(at.scales(block)), minimum) : minimum;
}

constexpr std::int64_t kAhead = 8192;  // bytes; into the second cache: asking for the first one holds up the loads

// Calls take(k, the numbers of all rows at k as floats) for each k of a block, in order, with exactly what dequantizing
// gives.
template <Format kFormat, typename R, typename Take>
inline void decode_block(const Part<kFormat>& at, std::int64_t block, Take take) {
    using F = typename R::F;
    if (kFormat == Format::kBf16Pairs) {
#pragma GCC unroll 16
        for (int two = 0; two < kBlock / 2; ++two) {
            const auto pair = R::pair(at.numbers(block) + two * 64);
            take(2 * two, R::first(pair));
            take(2 * two + 1, R::second(pair));
        }
        return;
    }
    const F scale = scale_of<kFormat, R>(at, block);
    if (has_bytes(kFormat)) {
#pragma GCC unroll 32
        for (int k = 0; k < kBlock; ++k) {
            const F number = R::pick(at.numbers(block) + k / 4 * 64, static_cast<std::uint32_t>(k % 4 * 8), 255);
            take(k, R::mul(R::sub(number, R::set(offset_of(kFormat))), scale));
        }
        return;
    }
    const F minimum = has_minimums(kFormat) ? minimum_of<kFormat, R>(at, block) : R::zero();
    const F second = has_half_scales(kFormat) ? scale_of<kFormat, R>(at, block, 1) : scale;
#pragma GCC unroll 2
    for (std::uint32_t high = 0; high < 2; ++high) {
#pragma GCC unroll 16
        for (std::uint32_t k = 0; k < 16; ++k) {
            if constexpr (has_codes(kFormat)) {
                const F number = R::template number_of<kFormat>(at.numbers(block) + k / 4 * 64, k % 4 * 8 + 4 * high);
                take(static_cast<int>(16 * high + k), R::mul(number, scale));
                continue;
            }
            F number = kFormat == Format::kQ3K ? R::pick(at.numbers(block) + high * 64, k % 4 * 8 + k / 4 * 2, 3)
                                               : R::pick(at.numbers(block) + k / 4 * 64, k % 4 * 8 + 4 * high, 15);
            if (high_bits(kFormat) == 1) {
                const F above = R::set(kFormat == Format::kQ3K ? 4.0F : 16.0F);
                number = R::fma(R::pick(at.high(block), k % 4 * 8 + k / 4 + 4 * high, 1), above, number);
            }
            if (high_bits(kFormat) == 2) {
                const F bits = R::pick(at.high(block) + high * 64, k % 4 * 8 + k / 4 * 2, 3);
                number = R::fma(bits, R::set(16.0F), number);
            }
            const F offset = R::set(offset_of(kFormat));
            const F value = has_minimums(kFormat) ? R::add(R::mul(number, scale), minimum)
                                                  : R::mul(R::sub(number, offset), high == 0 ? scale : second);
            take(static_cast<int>(16 * high + k), value);
        }
    }
}

#if defined(__AVX512VL__)
constexpr int kExactColumns = 8;
#else
constexpr int kExactColumns = 6;
#endif

constexpr std::int64_t kPanelBlocks = 4;  // decoded at once: they stay in the first cache for all columns

// Adds `count` values of k, even and odd ones apart so that sums do not wait for each other, to kColumns columns of a
// tile of rows. panel: [count][rows]; sums: [columns][even, odd][rows].
template <typename R, int kColumns>
inline void panel_tile(const float* panel, const float* x, std::int64_t stride, std::int64_t count, float* sums) {
    using F = typename R::F;
    F even[kColumns], odd[kColumns];
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
        even[c] = R::load(sums + 2 * c * R::kRows);
        odd[c] = R::load(sums + (2 * c + 1) * R::kRows);
    }
    for (std::int64_t k = 0; k < count; k += 2) {
        const F a = R::load(panel + k * R::kRows), b = R::load(panel + (k + 1) * R::kRows);
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
            even[c] = R::fma(a, R::set(x[c * stride + k]), even[c]);
            odd[c] = R::fma(b, R::set(x[c * stride + k + 1]), odd[c]);
        }
    }
#pragma GCC unroll 8
    for (int c = 0; c < kColumns; ++c) {
        R::store(sums + 2 * c * R::kRows, even[c]);
        R::store(sums + (2 * c + 1) * R::kRows, odd[c]);
    }
}

template <typename R>
inline void panel_columns(const LinearJob& job, const float* panel, std::int64_t first, std::int64_t count,
                          float* sums) {
    const float* x = job.x + first;
    const std::int64_t stride = job.x_stride;
    each_columns<kExactColumns>(job.columns, [&](auto width, std::int64_t column) {
        constexpr int kColumns = decltype(width)::kColumns;
        panel_tile<R, kColumns>(panel, x + column * stride, stride, count, sums + 2 * column * R::kRows);
    });
}

// One column: numbers are used as they are decoded. In the order of panel_tile, of kTiles tiles at once, so that sums
// do not wait for each other.
template <Format kFormat, typename R, int kTiles>
inline void exact_column(const LinearJob& job, std::int64_t row) {
    typename R::F sums[kTiles][2];
    for (auto& sum : sums) {
        sum[0] = sum[1] = R::zero();
    }
    for (std::int64_t block = 0; block < job.weight.cols / kBlock; ++block) {
        const float* x = job.x + block * kBlock;
        for (int t = 0; t < kTiles; ++t) {
            decode_block<kFormat, R>({job.weight, row + t * R::kRows}, block, [&](int k, typename R::F value) {
                sums[t][k % 2] = R::fma(value, R::set(x[k]), sums[t][k % 2]);
            });
        }
    }
    for (int t = 0; t < kTiles; ++t) {
        put_tile<R>(job, 0, row + t * R::kRows, R::add(sums[t][0], sums[t][1]));
    }
}

template <Format kFormat, typename R>
void exact_rows(const LinearJob& job, std::int64_t row, std::int64_t end, float* panel) {
    if (job.columns == 1) {
        for (; row + 32 <= end; row += 32) {
            exact_column<kFormat, R, 32 / R::kRows>(job, row);
        }
        for (; row < end; row += R::kRows) {
            exact_column<kFormat, R, 1>(job, row);
        }
        return;
    }
    const std::int64_t blocks = job.weight.cols / kBlock;
    float* sums = panel + kPanelBlocks * kBlock * R::kRows;
    for (; row < end; row += R::kRows) {
        const Part<kFormat> at(job.weight, row);
        std::memset(sums, 0, static_cast<std::size_t>(2 * job.columns * R::kRows) * 4);
        for (std::int64_t first = 0; first < blocks; first += kPanelBlocks) {
            const std::int64_t count = blocks - first < kPanelBlocks ? blocks - first : kPanelBlocks;
            for (std::int64_t block = 0; block < count; ++block) {
                float* decoded = panel + block * kBlock * R::kRows;
                decode_block<kFormat, R>(at, first + block,
                                         [&](int k, auto value) { R::store(decoded + k * R::kRows, value); });
            }
            panel_columns<R>(job, panel, first * kBlock, count * kBlock, sums);
        }
        for (std::int64_t column = 0; column < job.columns; ++column) {
            const float* two = sums + 2 * column * R::kRows;
            put_tile<R>(job, column, row, R::add(R::load(two), R::load(two + R::kRows)));
        }
    }
}

template <Format kFormat>
void packed_row(const Weight& weight, std::int64_t row, float* out) {
    const Part<kFormat> at(weight, row / 8 * 8);
    float block[kBlock * 8];
    for (std::int64_t i = 0; i < weight.cols / kBlock; ++i) {
        decode_block<kFormat, Rows8>(at, i, [&](int k, F8 value) { store8(block + k * 8, value); });
        for (std::int64_t k = 0; k < kBlock; ++k) {
            out[i * kBlock + k] = block[k * 8 + row % 8];
        }
    }
}

// 32 inputs times `by` as whole numbers, in digits.
inline void put_digits(const float* x, F8 by, bool one, InputBlock& to) {
    F8 low[4];
    for (int i = 0; i < 4; ++i) {
        low[i] = round8(mul8(load8(x + 8 * i), by));
    }
    Sums high_sums{};
    if (one) {
        std::memset(to.high, 0, sizeof to.high);
    } else {
        F8 high[4];
        for (int i = 0; i < 4; ++i) {
            high[i] = round8(mul8(low[i], set8(1.0F / kDigit)));
            low[i] = fma8(high[i], set8(-kDigit), low[i]);
        }
        high_sums = store32_i8(to.high, high);
    }
    const Sums low_sums = store32_i8(to.low, low);
    const auto sum = [](std::int32_t highs, std::int32_t lows) {  // of a block with a NaN it is any number
        return static_cast<std::int32_t>(kDigit * static_cast<std::uint32_t>(highs) + static_cast<std::uint32_t>(lows));
    };
    to.sum = sum(high_sums.all, low_sums.all);
    to.first_sum = sum(high_sums.first, low_sums.first);
}

// The step of inputs in float32 and what they are multiplied with, of which the largest has `top_number` steps.
struct Steps {
    F8 top = zero8(), odd = zero8();

    void see(F8 x) {
        top = max8(top, abs8(x));
        odd = fma8(x, zero8(), odd);  // NaN if an input is NaN or infinite
    }
    bool finite() const { return same8(odd, odd) == 255; }
    float most(float top_number) const {
        constexpr float kLeastStep = std::numeric_limits<float>::min();  // smaller ones would have no inverse
        const float largest = top8(top), least_top = top_number * kLeastStep;
        return largest < least_top ? least_top : largest;
    }
};

// With one scale for all. What is not finite must show, and nothing else of it may: its digits are zeros.
void to_token_digits(const float* x, std::int64_t count, bool one, float top_number, InputBlock* to) {
    Steps steps;
    for (std::int64_t i = 0; i < count; i += 8) {
        steps.see(load8(x + i));
    }
    const bool finite = steps.finite();
    const float most = steps.most(top_number), scale = finite ? most / top_number : kNotANumber;
    const F8 by = set8(top_number / most);
    for (std::int64_t block = 0; block < count / kBlock; ++block, x += kBlock, to += kInputColumns) {
        if (finite) {
            put_digits(x, by, one, *to);
        } else {
            *to = {};
        }
        to->scale = scale;
        to->scaled_sum = scale * static_cast<float>(to->sum);
        to->first_sum = to->sum + (block % kChunkBlocks == 0 ? 0 : (to - kInputColumns)->first_sum);
    }
}

void to_digits(const float* x, std::int64_t count, Rounding rounding, InputBlock* to) {
    const bool one = has_8_bits(rounding);
    const auto top_number = static_cast<float>(one ? kLargestDigit : kLargestNumber);
    if (is_of_tokens(rounding)) {
        return to_token_digits(x, count, one, top_number, to);
    }
    for (std::int64_t block = 0; block < count / kBlock; ++block, x += kBlock, to += kInputColumns) {
        Steps steps;
        for (int i = 0; i < 4; ++i) {
            steps.see(load8(x + 8 * i));
        }
        const float most = steps.most(top_number);
        put_digits(x, set8(top_number / most), one, *to);
        to->scale = steps.finite() ? most / top_number : kNotANumber;  // what is not must show
        to->scaled_sum = to->scale * static_cast<float>(to->sum);
    }
}
