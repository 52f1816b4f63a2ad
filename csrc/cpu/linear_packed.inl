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

// Where a row group's parts are; those of the next group lie `bytes` further.
struct Group {
    const std::uint8_t* scales;
    const std::uint8_t* minimums;
    const std::uint8_t* numbers;
    std::int64_t bytes;
};

template <Format kFormat>
inline Group group_at(const Weight& weight, std::int64_t group) {
    const std::int64_t blocks = weight.cols / kBlock;
    const std::int64_t head = (blocks * (kFormat == Format::kQ4Mins ? 32 : 16) + 63) / 64 * 64;
    const std::int64_t bytes = head + blocks * (kFormat == Format::kQ8 ? 256 : 128);
    const auto* p = static_cast<const std::uint8_t*>(weight.data) + group * bytes;
    return {p, p + blocks * 16, p + head, bytes};
}

// A single column reads weights faster than they are fetched unasked: those of the next tile are asked for.
template <typename R, int kBytes>
inline void fetch_next(const std::uint8_t* p, std::int64_t bytes) {
    for (int g = 0; g < R::kGroups; ++g) {
        for (int line = 0; line < kBytes; line += 64) {
            fetch(p + (R::kGroups + g) * bytes + line);
        }
    }
}

// kColumns columns of the R::kGroups row groups at `group`, inputs in int8: a block is decoded once for all columns.
template <Format kFormat, typename R, int kColumns>
inline void int8_tile(const LinearJob& job, std::int64_t group, std::int64_t column) {
    using F = typename R::F;
    const std::int64_t cols = job.weight.cols, blocks = cols / kBlock;
    const Group at = group_at<kFormat>(job.weight, group);
    const std::int8_t* numbers = job.numbers + column * cols;
    const BlockScale* scales = job.scales + column * blocks;
    F sums[kColumns], dots[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
        sums[c] = R::zero();
    }
    for (std::int64_t block = 0; block < blocks; ++block) {
        const F scale = R::scales(at.scales + block * 16, at.bytes);
        if (kFormat == Format::kQ8) {
            const std::uint8_t* p = at.numbers + block * 256;
            if (kColumns == 1) {
                fetch_next<R, 256>(p, at.bytes);
            }
            std::int32_t input_sums[kColumns];
            for (int c = 0; c < kColumns; ++c) {
                input_sums[c] = scales[c * blocks + block].sum;
            }
            R::template dots8<kColumns>(p, at.bytes, numbers + block * kBlock, cols, input_sums, dots);
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                const BlockScale& input = scales[c * blocks + block];
                const F weight = R::sub(R::pick(p + input.q8_place, at.bytes, input.q8_shift, 255), R::set(128.0F));
                const F both = R::fma(weight, R::set(input.largest), R::mul(dots[c], R::set(input.scale)));
                sums[c] = R::fma(both, scale, sums[c]);
            }
        } else {
            const std::uint8_t* p = at.numbers + block * 128;
            if (kColumns == 1) {
                fetch_next<R, 128>(p, at.bytes);
            }
            const F minimum = kFormat == Format::kQ4Mins ? R::scales(at.minimums + block * 16, at.bytes)
                                                         : R::mul(scale, R::set(-8.0F));
            R::template dots4<kColumns>(p, at.bytes, numbers + block * kBlock, cols, dots);
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                const BlockScale& input = scales[c * blocks + block];
                const F weight = R::pick(p + input.q4_place, at.bytes, input.q4_shift, 15);
                const F both = R::fma(weight, R::set(input.largest), R::mul(dots[c], R::set(input.scale)));
                sums[c] = R::fma(both, scale, sums[c]);
                sums[c] = R::fma(minimum, R::set(input.scaled_sum), sums[c]);
            }
        }
    }
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
        for (int g = 0; g < R::kGroups; ++g) {
            put_rows(job, column + c, (group + g) * kGroupRows, R::eight(sums[c], g));
        }
    }
}

// Some columns of all groups: their inputs stay in the first cache, the weights in the second.
template <Format kFormat, int kColumns>
void int8_columns(const LinearJob& job, std::int64_t group, std::int64_t end, std::int64_t column) {
    for (; group + Rows::kGroups <= end; group += Rows::kGroups) {
        int8_tile<kFormat, Rows, kColumns>(job, group, column);
    }
    for (; group < end; ++group) {
        int8_tile<kFormat, Rows8, kColumns>(job, group, column);
    }
}

template <Format kFormat>
void int8_rows(const LinearJob& job, std::int64_t group, std::int64_t end) {
    std::int64_t column = 0;
    for (; column + 8 <= job.columns; column += 8) {
        int8_columns<kFormat, 8>(job, group, end, column);
    }
    if (column + 4 <= job.columns) {
        int8_columns<kFormat, 4>(job, group, end, column);
        column += 4;
    }
    if (column + 2 <= job.columns) {
        int8_columns<kFormat, 2>(job, group, end, column);
        column += 2;
    }
    if (column < job.columns) {
        int8_columns<kFormat, 1>(job, group, end, column);
    }
}

// One block of a row group as floats [32][8 rows]: exactly what dequantizing gives.
template <Format kFormat>
inline void decode_block(const Group& at, std::int64_t block, float* out) {
    const F8 scale = Rows8::scales(at.scales + block * 16, 0);
    if (kFormat == Format::kQ8) {
        for (int piece = 0; piece < 8; ++piece) {
            const Words w = words_of(at.numbers + block * 256 + 32 * piece);
            for (int i = 0; i < 4; ++i) {
                store8(out + (4 * piece + i) * 8,
                       mul8(sub8(pick_of(w, static_cast<std::uint32_t>(8 * i), 255), set8(128.0F)), scale));
            }
        }
        return;
    }
    const F8 minimum = kFormat == Format::kQ4Mins ? Rows8::scales(at.minimums + block * 16, 0) : zero8();
    for (int piece = 0; piece < 4; ++piece) {
        const Words w = words_of(at.numbers + block * 128 + 32 * piece);
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
// row group. panel: [count][8 rows]; sums: [columns][even, odd][8 rows].
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

// One column: blocks of several row groups are decoded and used at once, so that sums do not wait for each other.
template <Format kFormat, int kGroups>
inline void exact_column(const LinearJob& job, std::int64_t group) {
    const std::int64_t blocks = job.weight.cols / kBlock;
    Group at[kGroups];
    F8 even[kGroups], odd[kGroups];
    for (int g = 0; g < kGroups; ++g) {
        at[g] = group_at<kFormat>(job.weight, group + g);
        even[g] = odd[g] = zero8();
    }
    alignas(64) float panel[kGroups][kBlock * 8];
    for (std::int64_t block = 0; block < blocks; ++block) {
        const float* x = job.x + block * kBlock;
        for (int g = 0; g < kGroups; ++g) {
            decode_block<kFormat>(at[g], block, panel[g]);
        }
        for (std::int64_t k = 0; k < kBlock; k += 2) {
            const F8 first = set8(x[k]), second = set8(x[k + 1]);
            for (int g = 0; g < kGroups; ++g) {
                even[g] = fma8(load8(panel[g] + k * 8), first, even[g]);
                odd[g] = fma8(load8(panel[g] + k * 8 + 8), second, odd[g]);
            }
        }
    }
    for (int g = 0; g < kGroups; ++g) {
        put_rows(job, 0, (group + g) * kGroupRows, add8(even[g], odd[g]));
    }
}

template <Format kFormat>
void exact_rows(const LinearJob& job, std::int64_t group, std::int64_t end, float* panel) {
    if (job.columns == 1) {
        for (; group + 4 <= end; group += 4) {
            exact_column<kFormat, 4>(job, group);
        }
        for (; group < end; ++group) {
            exact_column<kFormat, 1>(job, group);
        }
        return;
    }
    const std::int64_t blocks = job.weight.cols / kBlock;
    float* sums = panel + kPanelBlocks * kBlock * 8;
    for (; group < end; ++group) {
        const Group at = group_at<kFormat>(job.weight, group);
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
            put_rows(job, column, group * kGroupRows, sum);
        }
    }
}

template <Format kFormat>
void packed_rows(const LinearJob& job, std::int64_t first_row, std::int64_t end_row, float* scratch) {
    const std::int64_t group = first_row / kGroupRows, end = (end_row + kGroupRows - 1) / kGroupRows;
    if (job.weight.exact) {
        exact_rows<kFormat>(job, group, end, scratch);
    } else {
        int8_rows<kFormat>(job, group, end);
    }
}

template <Format kFormat>
void packed_row(const Weight& weight, std::int64_t row, float* out) {
    const Group at = group_at<kFormat>(weight, row / kGroupRows);
    float block[kBlock * 8];
    for (std::int64_t i = 0; i < weight.cols / kBlock; ++i) {
        decode_block<kFormat>(at, i, block);
        for (std::int64_t k = 0; k < kBlock; ++k) {
            out[i * kBlock + k] = block[k * 8 + row % kGroupRows];
        }
    }
}

inline std::uint32_t lowest_bit(std::uint32_t bits) {
    std::uint32_t at = 0;
    while ((bits >> at & 1U) == 0) {
        ++at;
    }
    return at;
}

void quantize(const float* x, std::int64_t count, std::int8_t* numbers, BlockScale* scales) {
    for (std::int64_t block = 0; block < count / kBlock; ++block, x += kBlock, numbers += kBlock) {
        F8 top = zero8(), odd = zero8();
        for (int i = 0; i < 4; ++i) {
            top = max8(top, abs8(load8(x + 8 * i)));
            odd = fma8(load8(x + 8 * i), zero8(), odd);  // NaN if any input is NaN or infinite
        }
        const F8 largest = set8(top8(top));
        std::uint32_t at = 31;
        for (std::uint32_t i = 0; i < 4; ++i) {
            const std::uint32_t same = same8(abs8(load8(x + 8 * i)), largest);
            if (same != 0) {
                at = 8 * i + lowest_bit(same);
                break;
            }
        }
        float others[kBlock];
        std::memcpy(others, x, sizeof others);
        others[at] = 0;
        top = zero8();
        for (int i = 0; i < 4; ++i) {
            top = max8(top, abs8(load8(others + 8 * i)));
        }
        const float next = top8(top), scale = next / 127.0F;
        const F8 by = set8(next > 0 ? 127.0F / next : 0.0F);
        std::int32_t sum = 0;
        for (int i = 0; i < 4; ++i) {
            sum += store8_i8(numbers + 8 * i, mul8(load8(others + 8 * i), by));
        }
        const float kept = x[at] + sum8(odd);  // what is not finite must reach the result
        const std::uint32_t piece = at / 4, byte = at % 4 * 8;
        scales[block] = {scale,          scale * static_cast<float>(sum) + kept,
                         kept,           sum,
                         piece % 4 * 32, byte + (at < 16 ? 0U : 4U),
                         piece * 32,     byte};
    }
}
