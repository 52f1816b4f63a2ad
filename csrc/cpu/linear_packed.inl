// Products with packed weights: eight rows per register, so that a result is a lane and nothing is summed across.

inline F8 scales8(const std::uint8_t* p) { return load8_f16(reinterpret_cast<const std::uint16_t*>(p)); }

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

// Where a row group's parts are.
struct Group {
    const std::uint8_t* scales;
    const std::uint8_t* minimums;
    const std::uint8_t* numbers;
};

template <Format kFormat>
inline Group group_at(const Weight& weight, std::int64_t group) {
    const std::int64_t blocks = weight.cols / kBlock;
    const std::int64_t head = (blocks * (kFormat == Format::kQ4Mins ? 32 : 16) + 63) / 64 * 64;
    const std::int64_t bytes = head + blocks * (kFormat == Format::kQ8 ? 256 : 128);
    const auto* p = static_cast<const std::uint8_t*>(weight.data) + group * bytes;
    return {p, p + blocks * 16, p + head};
}

// kColumns columns of kGroups row groups with inputs in int8: a block is decoded once for all columns.
template <Format kFormat, int kColumns, int kGroups>
inline void int8_tile(const LinearJob& job, std::int64_t group, std::int64_t column) {
    const std::int64_t blocks = job.weight.cols / kBlock;
    Group at[kGroups];
    F8 sums[kGroups][kColumns];
    for (int g = 0; g < kGroups; ++g) {
        at[g] = group_at<kFormat>(job.weight, group + g);
        for (int c = 0; c < kColumns; ++c) {
            sums[g][c] = zero8();
        }
    }
    const std::int8_t* numbers = job.numbers + column * job.weight.cols;
    const BlockScale* scales = job.scales + column * blocks;
    for (std::int64_t block = 0; block < blocks; ++block) {
        for (int g = 0; g < kGroups; ++g) {
            const F8 scale = scales8(at[g].scales + block * 16);
            if (kFormat == Format::kQ8) {
                const std::uint8_t* p = at[g].numbers + block * 256;
                if (kColumns == 1) {
                    for (int line = 0; line < 4; ++line) {
                        fetch(p + 2048 + 64 * line);
                    }
                }
                const Bytes bytes = bytes_of(p);
                for (int c = 0; c < kColumns; ++c) {
                    const BlockScale& input = scales[c * blocks + block];
                    const F8 dot = dot_bytes(bytes, numbers + c * job.weight.cols + block * kBlock, input.sum);
                    const F8 weight = sub8(pick(words(p + input.q8_place), input.q8_shift, 255), set8(128.0F));
                    const F8 both = fma8(weight, set8(input.largest), mul8(dot, set8(input.scale)));
                    sums[g][c] = fma8(both, scale, sums[g][c]);
                }
            } else {
                const std::uint8_t* p = at[g].numbers + block * 128;
                if (kColumns == 1) {
                    fetch(p + 1536);
                    fetch(p + 1600);
                }
                const Nibbles n = nibbles(p);
                const F8 minimum =
                    kFormat == Format::kQ4Mins ? scales8(at[g].minimums + block * 16) : mul8(scale, set8(-8.0F));
                for (int c = 0; c < kColumns; ++c) {
                    const BlockScale& input = scales[c * blocks + block];
                    const F8 dot = dot_nibbles(n, numbers + c * job.weight.cols + block * kBlock);
                    const F8 weight = pick(words(p + input.q4_place), input.q4_shift, 15);
                    const F8 both = fma8(weight, set8(input.largest), mul8(dot, set8(input.scale)));
                    sums[g][c] = fma8(both, scale, sums[g][c]);
                    sums[g][c] = fma8(minimum, set8(input.scaled_sum), sums[g][c]);
                }
            }
        }
    }
    for (int g = 0; g < kGroups; ++g) {
        for (int c = 0; c < kColumns; ++c) {
            put_rows(job, column + c, (group + g) * kGroupRows, sums[g][c]);
        }
    }
}

template <Format kFormat>
void int8_rows(const LinearJob& job, std::int64_t group, std::int64_t end) {
    if (job.columns == 1) {
        for (; group + 2 <= end; group += 2) {
            int8_tile<kFormat, 1, 2>(job, group, 0);
        }
    }
    for (; group < end; ++group) {
        std::int64_t column = 0;
        for (; column + 8 <= job.columns; column += 8) {
            int8_tile<kFormat, 8, 1>(job, group, column);
        }
        switch (job.columns - column) {
            case 7:
                int8_tile<kFormat, 4, 1>(job, group, column);
                int8_tile<kFormat, 3, 1>(job, group, column + 4);
                break;
            case 6:
                int8_tile<kFormat, 6, 1>(job, group, column);
                break;
            case 5:
                int8_tile<kFormat, 5, 1>(job, group, column);
                break;
            case 4:
                int8_tile<kFormat, 4, 1>(job, group, column);
                break;
            case 3:
                int8_tile<kFormat, 3, 1>(job, group, column);
                break;
            case 2:
                int8_tile<kFormat, 2, 1>(job, group, column);
                break;
            case 1:
                int8_tile<kFormat, 1, 1>(job, group, column);
                break;
            default:
                break;
        }
    }
}

// One block of a row group as floats [32][8 rows]: exactly what dequantizing gives.
template <Format kFormat>
inline void decode_block(const Group& at, std::int64_t block, float* out) {
    const F8 scale = scales8(at.scales + block * 16);
    if (kFormat == Format::kQ8) {
        for (int piece = 0; piece < 8; ++piece) {
            const Words w = words(at.numbers + block * 256 + 32 * piece);
            for (int i = 0; i < 4; ++i) {
                store8(out + (4 * piece + i) * 8,
                       mul8(sub8(pick(w, static_cast<std::uint32_t>(8 * i), 255), set8(128.0F)), scale));
            }
        }
        return;
    }
    const F8 minimum = kFormat == Format::kQ4Mins ? scales8(at.minimums + block * 16) : zero8();
    for (int piece = 0; piece < 4; ++piece) {
        const Words w = words(at.numbers + block * 128 + 32 * piece);
        for (int i = 0; i < 4; ++i) {
            for (int high = 0; high < 2; ++high) {
                const F8 nibble = pick(w, static_cast<std::uint32_t>(8 * i + 4 * high), 15);
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
