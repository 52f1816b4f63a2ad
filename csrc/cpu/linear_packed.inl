// Products with packed weights: eight rows per register, so that a result is a lane and nothing is summed across.

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

// The part of a packed matrix that a tile of rows, the first of them `row`, has in a group's blocks.
template <Format kFormat>
struct Part {
    static constexpr std::int64_t kNumbers = numbers_bytes(kFormat), kBytes = block_bytes(kFormat);
    const std::uint8_t* group;
    std::int64_t lane;

    Part(const Weight& weight, std::int64_t row)
        : group(static_cast<const std::uint8_t*>(weight.data) + row / kGroupRows * (weight.cols / kBlock) * kBytes),
          lane(row % kGroupRows) {}
    const std::uint8_t* numbers(std::int64_t block) const { return group + block * kBytes + lane * 4; }
    const std::uint8_t* scales(std::int64_t block) const { return group + block * kBytes + kNumbers + lane * 2; }
    const std::uint8_t* minimums(std::int64_t block) const { return scales(block) + kGroupRows * 2; }
};

constexpr std::int64_t kAhead = 2560;  // bytes

// kColumns columns of R::kRows rows with inputs in int8: a block is decoded once for all columns.
template <Format kFormat, typename R, int kColumns>
inline void int8_tile(const LinearJob& job, std::int64_t row, std::int64_t column) {
    using F = typename R::F;
    using At = Part<kFormat>;
    const std::int64_t blocks = job.weight.cols / kBlock;
    const At at(job.weight, row);
    const InputBlock* inputs = job.inputs + input_at(column, blocks);
    F sums[kColumns], dots[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
        sums[c] = R::zero();
    }
    for (std::int64_t block = 0; block < blocks; ++block, inputs += kInputColumns) {
        const std::uint8_t* p = at.numbers(block);
        const F scale = R::halves(at.scales(block));
        for (std::int64_t line = 0; column == 0 && line < At::kBytes; line += 64) {
            fetch(p + kAhead + line);
        }
        if (kFormat == Format::kQ8) {
            R::template dots8<kColumns>(p, inputs, dots);
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                const InputBlock& input = inputs[c];
                const F weight = R::sub(R::pick(p + input.q8_place, input.q8_shift, 255), R::set(128.0F));
                const F both = R::fma(weight, R::set(input.largest), R::mul(dots[c], R::set(input.scale)));
                sums[c] = R::fma(both, scale, sums[c]);
            }
        } else {
            R::template dots4<kColumns>(p, inputs, dots);
            const F minimum = kFormat == Format::kQ4Mins ? R::halves(at.minimums(block)) : R::mul(scale, R::set(-8.0F));
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                const InputBlock& input = inputs[c];
                const F weight = R::pick(p + input.q4_place, input.q4_shift, 15);
                const F both = R::fma(weight, R::set(input.largest), R::mul(dots[c], R::set(input.scale)));
                sums[c] = R::fma(both, scale, sums[c]);
                sums[c] = R::fma(minimum, R::set(input.scaled_sum), sums[c]);
            }
        }
    }
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
        for (int first = 0; first < R::kRows; first += 8) {
            put_rows(job, column + c, row + first, R::eight(sums[c], first / 8));
        }
    }
}

// All rows with some columns, before the next columns: the inputs stay in the first cache, the weights in the second.
template <Format kFormat, int kColumns>
void int8_columns(const LinearJob& job, std::int64_t row, std::int64_t end, std::int64_t column) {
    for (; row < end; row += Rows::kRows) {
        int8_tile<kFormat, Rows, kColumns>(job, row, column);
    }
}

template <Format kFormat>
void int8_rows(const LinearJob& job, std::int64_t row, std::int64_t end) {
    std::int64_t column = 0;
    for (; column + 8 <= job.columns; column += 8) {
        int8_columns<kFormat, 8>(job, row, end, column);
    }
    if (column + 4 <= job.columns) {
        int8_columns<kFormat, 4>(job, row, end, column);
        column += 4;
    }
    if (column + 2 <= job.columns) {
        int8_columns<kFormat, 2>(job, row, end, column);
        column += 2;
    }
    if (column < job.columns) {
        int8_columns<kFormat, 1>(job, row, end, column);
    }
}

// A block of eight rows as floats [32][8 rows]: exactly what dequantizing gives.
template <Format kFormat>
inline void decode_block(const Part<kFormat>& at, std::int64_t block, float* out) {
    const F8 scale = Rows8::halves(at.scales(block));
    if (kFormat == Format::kQ8) {
        for (int piece = 0; piece < 8; ++piece) {
            const Words w = words_of(at.numbers(block) + 64 * piece);
            for (int i = 0; i < 4; ++i) {
                store8(out + (4 * piece + i) * 8,
                       mul8(sub8(pick_of(w, static_cast<std::uint32_t>(8 * i), 255), set8(128.0F)), scale));
            }
        }
        return;
    }
    const F8 minimum = kFormat == Format::kQ4Mins ? Rows8::halves(at.minimums(block)) : zero8();
    for (int piece = 0; piece < 4; ++piece) {
        const Words w = words_of(at.numbers(block) + 64 * piece);
        for (int i = 0; i < 4; ++i) {
            for (int high = 0; high < 2; ++high) {
                const F8 nibble = pick_of(w, static_cast<std::uint32_t>(8 * i + 4 * high), 15);
                const F8 value = kFormat == Format::kQ4Mins ? add8(mul8(nibble, scale), minimum)
                                                            : mul8(sub8(nibble, set8(8.0F)), scale);
                store8(out + (16 * high + 4 * piece + i) * 8, value);
            }
        }
    }
}

#if defined(__AVX512VL__)
constexpr int kExactColumns = 8;
#else
constexpr int kExactColumns = 6;
#endif

constexpr std::int64_t kPanelBlocks = 8;  // decoded at once: 8 KiB, which stay in the first cache for all columns

// Adds `count` values of k, even and odd ones apart so that sums do not wait for each other, to kColumns columns of a
// tile of eight rows. panel: [count][8 rows]; sums: [columns][even, odd][8 rows].
template <int kColumns>
inline void panel_tile(const float* panel, const float* x, std::int64_t stride, std::int64_t count, float* sums) {
    F8 even[kColumns], odd[kColumns];
    for (int c = 0; c < kColumns; ++c) {
        even[c] = load8(sums + c * 16);
        odd[c] = load8(sums + c * 16 + 8);
    }
    for (std::int64_t k = 0; k < count; k += 2) {
        const F8 a = load8(panel + k * 8), b = load8(panel + k * 8 + 8);
        for (int c = 0; c < kColumns; ++c) {
            even[c] = fma8(a, set8(x[c * stride + k]), even[c]);
            odd[c] = fma8(b, set8(x[c * stride + k + 1]), odd[c]);
        }
    }
    for (int c = 0; c < kColumns; ++c) {
        store8(sums + c * 16, even[c]);
        store8(sums + c * 16 + 8, odd[c]);
    }
}

inline void panel_columns(const LinearJob& job, const float* panel, std::int64_t first, std::int64_t count,
                          float* sums) {
    const float* x = job.x + first;
    const std::int64_t stride = job.x_stride;
    std::int64_t column = 0;
    for (; column + kExactColumns <= job.columns; column += kExactColumns) {
        panel_tile<kExactColumns>(panel, x + column * stride, stride, count, sums + column * 16);
    }
    for (; column + 4 <= job.columns; column += 4) {
        panel_tile<4>(panel, x + column * stride, stride, count, sums + column * 16);
    }
    for (; column + 2 <= job.columns; column += 2) {
        panel_tile<2>(panel, x + column * stride, stride, count, sums + column * 16);
    }
    if (column < job.columns) {
        panel_tile<1>(panel, x + column * stride, stride, count, sums + column * 16);
    }
}

// One column: blocks of several tiles of eight rows are decoded and used at once, so that sums do not wait for each
// other.
template <Format kFormat, int kTiles>
inline void exact_column(const LinearJob& job, std::int64_t row) {
    const std::int64_t blocks = job.weight.cols / kBlock;
    F8 even[kTiles], odd[kTiles];
    for (int g = 0; g < kTiles; ++g) {
        even[g] = odd[g] = zero8();
    }
    alignas(64) float panel[kTiles][kBlock * 8];
    for (std::int64_t block = 0; block < blocks; ++block) {
        const float* x = job.x + block * kBlock;
        for (int g = 0; g < kTiles; ++g) {
            decode_block<kFormat>({job.weight, row + 8 * g}, block, panel[g]);
        }
        for (std::int64_t k = 0; k < kBlock; k += 2) {
            const F8 first = set8(x[k]), second = set8(x[k + 1]);
            for (int g = 0; g < kTiles; ++g) {
                even[g] = fma8(load8(panel[g] + k * 8), first, even[g]);
                odd[g] = fma8(load8(panel[g] + k * 8 + 8), second, odd[g]);
            }
        }
    }
    for (int g = 0; g < kTiles; ++g) {
        put_rows(job, 0, row + 8 * g, add8(even[g], odd[g]));
    }
}

template <Format kFormat>
void exact_rows(const LinearJob& job, std::int64_t row, std::int64_t end, float* panel) {
    if (job.columns == 1) {
        for (; row + 32 <= end; row += 32) {
            exact_column<kFormat, 4>(job, row);
        }
        for (; row < end; row += 8) {
            exact_column<kFormat, 1>(job, row);
        }
        return;
    }
    const std::int64_t blocks = job.weight.cols / kBlock;
    float* sums = panel + kPanelBlocks * kBlock * 8;
    for (; row < end; row += 8) {
        const Part<kFormat> at(job.weight, row);
        std::memset(sums, 0, static_cast<std::size_t>(job.columns) * 64);
        for (std::int64_t first = 0; first < blocks; first += kPanelBlocks) {
            const std::int64_t count = blocks - first < kPanelBlocks ? blocks - first : kPanelBlocks;
            for (std::int64_t block = 0; block < count; ++block) {
                decode_block<kFormat>(at, first + block, panel + block * kBlock * 8);
            }
            panel_columns(job, panel, first * kBlock, count * kBlock, sums);
        }
        for (std::int64_t column = 0; column < job.columns; ++column) {
            const F8 sum = add8(load8(sums + column * 16), load8(sums + column * 16 + 8));
            put_rows(job, column, row, sum);
        }
    }
}

template <Format kFormat>
void packed_rows(const LinearJob& job, std::int64_t first_row, std::int64_t end_row, float* scratch) {
    if (job.weight.exact) {
        exact_rows<kFormat>(job, first_row, end_row, scratch);
    } else {
        int8_rows<kFormat>(job, first_row, end_row);
    }
}

template <Format kFormat>
void packed_row(const Weight& weight, std::int64_t row, float* out) {
    const Part<kFormat> at(weight, row / 8 * 8);
    float block[kBlock * 8];
    for (std::int64_t i = 0; i < weight.cols / kBlock; ++i) {
        decode_block<kFormat>(at, i, block);
        for (std::int64_t k = 0; k < kBlock; ++k) {
            out[i * kBlock + k] = block[k * 8 + row % 8];
        }
    }
}

void quantize(const float* x, std::int64_t count, InputBlock* to) {
    for (std::int64_t block = 0; block < count / kBlock; ++block, x += kBlock, to += kInputColumns) {
        F8 values[4], top = zero8(), odd = zero8();
        for (int i = 0; i < 4; ++i) {
            values[i] = load8(x + 8 * i);
            top = max8(top, abs8(values[i]));
            odd = fma8(values[i], zero8(), odd);  // NaN if an input is NaN or infinite
        }
        const F8 largest = set8(top8(top));
        std::uint32_t same = 1U << 31;  // one is always found, unless there are NaN
        for (int i = 0; i < 4; ++i) {
            same |= same8(abs8(values[i]), largest) << 8 * i;
        }
        const auto at = static_cast<std::uint32_t>(__builtin_ctz(same));
        top = zero8();
        for (int i = 0; i < 4; ++i) {
            values[i] = without8(values[i], static_cast<int>(at) - 8 * i);
            top = max8(top, abs8(values[i]));
        }
        const float next = top8(top), scale = next / 127.0F;
        const F8 by = set8(next > 0 ? 127.0F / next : 0.0F);
        for (F8& value : values) {
            value = mul8(value, by);
        }
        const std::int32_t sum = store32_i8(to->numbers, values);
        const float kept = same8(odd, odd) == 255 ? x[at] : x[at] + sum8(odd);  // what is not finite must show
        const std::uint32_t piece = at / 4, byte = at % 4 * 8;
        to->scale = scale;
        to->scaled_sum = scale * static_cast<float>(sum) + kept;
        to->largest = kept;
        to->sum = sum;
        to->q4_place = piece % 4 * 64;
        to->q4_shift = byte + (at < 16 ? 0U : 4U);
        to->q8_place = piece * 64;
        to->q8_shift = byte;
    }
}
