// Products of columns with weights of 4 to 8 bits, without VNNI: inputs as whole numbers of 16 bits, so that one
// instruction multiplies both digits, and sums of 32 bits, which are exact: results have the bits of digit_tile.
//
// A group's numbers are spread to 16 bits once for all columns, some blocks at a time (a panel), and a load of inputs
// serves both halves of the group. Of each four neighbours the first and the third lie together, then the others.

// Fewer columns take less time with digits apart, where there are instructions for bytes.
template <Format kFormat>
constexpr std::int64_t kFewestWide = !kDigitsApart                 ? 1
                                     : has_signed_numbers(kFormat) ? 3
                                                                   : 4;
constexpr std::int64_t kWideSlab = 48;   // columns for which a panel is spread once
constexpr std::int64_t kWideBlocks = 8;  // of a panel, which stays in the first cache with its inputs

// A block of a group. The scales are those of both halves where these have their own; else the second ones are what
// Scaling has as minimum.
struct alignas(64) WideBlock {
    std::int16_t numbers[kBlock / 2][kGroupRows][2];
    float scales[2][kGroupRows];
};

// A block of a column's inputs.
struct WideInputs {
    std::int16_t x[kBlock / 2][2];
    float scale, scaled_sum;
};

// A block of a group as numbers of 16 bits, with its scales.
template <Format kFormat>
inline void spread_block(const Weight& weight, std::int64_t row, std::int64_t block, WideBlock& to) {
    for (std::int64_t line = 0; line < Part<kFormat>::kBytes; line += 64) {
        fetch_second(Part<kFormat>(weight, row).line(block) + kAhead + line);
    }
    for (int part = 0; part < kGroupRows; part += Rows8::kRows) {
        const Part<kFormat> at(weight, row + part);
        spread_rows<kFormat>(at.numbers(block), at.high(block), &to.numbers[0][part]);
        const Scaling<kFormat, Rows8> scaling(at, block);
        store8(to.scales[0] + part, scaling.scale);
        store8(to.scales[1] + part,
               has_half_scales(kFormat) ? Scaling<kFormat, Rows8>(at, block, 1).scale : scaling.minimum);
    }
}

// The sums of products of kCount pairs, from pair kFirst on, of kColumns columns and 16 rows. kMore: added to what
// `dots` are.
template <int kFirst, int kCount, int kColumns, bool kMore = false>
__attribute__((always_inline)) inline void wide_dots(const WideBlock& weights, const WideInputs* x,
                                                     Whole8 (&dots)[kColumns][2]) {
#pragma GCC unroll 16
    for (int k = kFirst; k < kFirst + kCount; ++k) {
        const Pairs8 first = pairs_of(weights.numbers[k][0]), second = pairs_of(weights.numbers[k][8]);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
            const Pairs8 input = same_pairs(x[c].x[k]);
            const Whole8 one = times8(first, input), other = times8(second, input);
            dots[c][0] = k == kFirst && !kMore ? one : add8(dots[c][0], one);
            dots[c][1] = k == kFirst && !kMore ? other : add8(dots[c][1], other);
            as_is(dots[c][0]);  // else compilers make all products before they add any
            as_is(dots[c][1]);
        }
    }
}

// Adds the products of `count` blocks to the sums of kColumns columns of a group. sums: [kColumns][kGroupRows].
template <Format kFormat, int kColumns>
__attribute__((noinline)) void wide_tile(const WideBlock* weights, const WideInputs* x, std::int64_t count,
                                         float* sums) {
    for (; count > 0; --count, ++weights, x += kColumns) {
        Whole8 dots[kColumns][2];
        const auto add = [&](int half) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; ++part) {
                const F8 scale = load8(weights->scales[half] + 8 * part);
#pragma GCC unroll 4
                for (int c = 0; c < kColumns; ++c) {
                    float* sum = sums + c * kGroupRows + 8 * part;
                    const F8 dot = mul8(to_float8(dots[c][part]), set8(x[c].scale));
                    F8 more = fma8(dot, scale, load8(sum));
                    if (!has_signed_numbers(kFormat)) {
                        more = fma8(load8(weights->scales[1] + 8 * part), set8(x[c].scaled_sum), more);
                    }
                    store8(sum, more);
                }
            }
        };
        if (has_half_scales(kFormat)) {
            wide_dots<0, 8>(*weights, x, dots);
            add(0);
            wide_dots<8, 8>(*weights, x, dots);
            add(1);
        } else {
            wide_dots<0, 16>(*weights, x, dots);
            add(0);
        }
    }
}

// Adds the products of `count` blocks to the whole sums of kColumns columns of a group, [kColumns][kGroupRows].
template <int kColumns>
__attribute__((noinline)) void whole_tile(const WideBlock* weights, const WideInputs* x, std::int64_t count,
                                          std::int32_t* sums) {
    Whole8 dots[kColumns][2];
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
        dots[c][0] = load8_whole(sums + c * kGroupRows);
        dots[c][1] = load8_whole(sums + c * kGroupRows + 8);
    }
    for (; count > 0; --count, ++weights, x += kColumns) {
        wide_dots<0, 16, kColumns, true>(*weights, x, dots);
    }
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
        store8_whole(sums + c * kGroupRows, dots[c][0]);
        store8_whole(sums + c * kGroupRows + 8, dots[c][1]);
    }
}

// Adds the whole sums of a chunk, and leaves zeros. With the last chunk's come the scales.
inline void add_chunk(const Weight& weight, std::int64_t row, const InputBlock& input, bool last, std::int32_t* whole,
                      float* sums) {
    for (int part = 0; part < 2; ++part) {
        F8 sum = add8(load8(sums + 8 * part), to_float8(load8_whole(whole + 8 * part)));
        if (last) {
            const F8 scale = scale_of<Format::kQ8Rows, Rows8>(Part<Format::kQ8Rows>(weight, row + 8 * part), 0);
            sum = mul8(mul8(sum, set8(input.scale)), scale);
        }
        store8(sums + 8 * part, sum);
    }
    std::memset(whole, 0, kGroupRows * sizeof *whole);
}

// Takes the sums of a group, and leaves zeros.
inline void put_sums(const LinearJob& job, std::int64_t column, std::int64_t row, float* sums) {
    put_tile<Rows8>(job, column, row, load8(sums));
    if (row + 8 < job.weight.rows) {
        put_tile<Rows8>(job, column, row + 8, load8(sums + 8));
    }
    store8(sums, zero8());
    store8(sums + 8, zero8());
}

struct WideSpace {
    WideBlock* panel;     // [kWideBlocks]
    float* sums;          // [kWideSlab, kGroupRows], zeros between groups
    std::int32_t* whole;  // the same of chunks, zeros between these
    WideInputs* x;        // [tiles of columns, blocks, columns of the tile]
};

template <Format kFormat>
void wide_slab(const LinearJob& job, std::int64_t row, std::int64_t end, std::int64_t first, std::int64_t last,
               const WideSpace& space) {
    const std::int64_t blocks = job.weight.cols / kBlock;
    each_columns<kWideColumns>(last - first, [&](auto width, std::int64_t column) {
        constexpr int kColumns = decltype(width)::kColumns;
        WideInputs* x = space.x + column * blocks;
        for (int c = 0; c < kColumns; ++c) {
            const InputBlock* input = job.digits + input_at(first + column + c, blocks);
            for (std::int64_t block = 0; block < blocks; ++block) {
                const InputBlock& from = input[block * kInputColumns];
                WideInputs& to = x[block * kColumns + c];
                widen_digits(from.high, from.low, to.x[0]);
                to.scale = from.scale;
                to.scaled_sum = from.scaled_sum;
            }
        }
    });
    const std::int64_t tiles = (last - first + kWideColumns - 1) / kWideColumns;
    for (; row < end; row += kGroupRows) {
        LowRankTile<kWideSlab> adapters(job, first, last - first, row, kGroupRows,
                                        (blocks + kWideBlocks - 1) / kWideBlocks * tiles);
        for (std::int64_t block = 0; block < blocks; block += kWideBlocks) {
            const std::int64_t count = blocks - block < kWideBlocks ? blocks - block : kWideBlocks;
            for (std::int64_t i = 0; i < count; ++i) {
                spread_block<kFormat>(job.weight, row, block + i, space.panel[i]);
            }
            each_columns<kWideColumns>(last - first, [&](auto width, std::int64_t column) {
                constexpr int kColumns = decltype(width)::kColumns;
                adapters.fetch_some();
                const WideInputs* x = space.x + column * blocks + block * kColumns;
                if constexpr (has_row_scales(kFormat)) {
                    static_assert(kChunkBlocks % kWideBlocks == 0);
                    const bool ends = block + count == blocks;
                    whole_tile<kColumns>(space.panel, x, count, space.whole + column * kGroupRows);
                    for (int c = 0; c < kColumns && (ends || (block + count) % kChunkBlocks == 0); ++c) {
                        const std::int64_t at = (column + c) * kGroupRows;
                        const InputBlock& input = job.digits[input_at(first + column + c, blocks)];
                        add_chunk(job.weight, row, input, ends, space.whole + at, space.sums + at);
                    }
                } else {
                    wide_tile<kFormat, kColumns>(space.panel, x, count, space.sums + column * kGroupRows);
                }
                for (int c = 0; c < kColumns && block + count == blocks; ++c) {
                    put_sums(job, first + column + c, row, space.sums + (column + c) * kGroupRows);
                }
            });
        }
        adapters.add(job, first, last - first, row, kGroupRows);
    }
}

// The columns from `column` on.
template <Format kFormat>
void wide_rows(const LinearJob& job, std::int64_t row, std::int64_t end, std::int64_t column, float* scratch) {
    WideSpace space;
    space.panel = reinterpret_cast<WideBlock*>((reinterpret_cast<std::uintptr_t>(scratch) + 63) / 64 * 64);
    space.sums = reinterpret_cast<float*>(space.panel + kWideBlocks);
    space.whole = reinterpret_cast<std::int32_t*>(space.sums + kWideSlab * kGroupRows);
    space.x = reinterpret_cast<WideInputs*>(space.whole + kWideSlab * kGroupRows);
    std::memset(space.sums, 0, 2 * kWideSlab * kGroupRows * 4);
    for (; column < job.columns; column += kWideSlab) {
        const std::int64_t last = column + kWideSlab < job.columns ? column + kWideSlab : job.columns;
        wide_slab<kFormat>(job, row, end, column, last, space);
    }
}

std::int64_t wide_scratch(const LinearJob& job) {
    const std::int64_t columns = job.columns < kWideSlab ? job.columns : kWideSlab;
    const std::int64_t panel = 64 + kWideBlocks * static_cast<std::int64_t>(sizeof(WideBlock));
    const std::int64_t inputs = columns * (job.weight.cols / kBlock) * static_cast<std::int64_t>(sizeof(WideInputs));
    return (panel + inputs) / 4 + 2 * kWideSlab * kGroupRows;
}
