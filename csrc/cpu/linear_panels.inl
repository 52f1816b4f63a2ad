// Products of many columns as floats. Weights are decoded and inputs put into the order of their use, into panels that
// caches keep, of some k at a time: so nothing but products is left for the innermost loop. Sums are kept between.

#if defined(__AVX512VL__)
constexpr int kPanelColumns = 8;
#else
constexpr int kPanelColumns = 4;
#endif
constexpr int kPanelTiles = 3;
constexpr std::int64_t kPanelRows = kPanelTiles * Rows::kRows, kPanelWide = 8;  // columns that lie together
constexpr std::int64_t kPanelSlab = 256, kTurnRows = 480, kPanelNumbers = 128;
constexpr std::int64_t kFewestExact = 64;  // columns for which panels of exact inputs pay

// How many sums a result has, which take turns in k: one of inputs rounded to bfloat16 (as bf16_tile), two of inputs as
// they are (as panel_tile). Each has a panel.
constexpr std::int64_t num_sums(Rounding rounding) { return rounding == Rounding::kNone ? 2 : 1; }

inline Division panels_division(const Weight& weight, std::int64_t columns) {
    const std::int64_t slabs = (columns + kPanelSlab - 1) / kPanelSlab, all = slabs * kInputColumns;
    return {kPanelRows, kTurnRows / num_sums(weight.rounding), (columns + all - 1) / all * kInputColumns};
}

inline bool exact_in_panels(std::int64_t columns) { return columns >= kFewestExact; }

struct Panels {
    float* weights;  // [sum, k, rows]: one in the first cache
    float* inputs;   // [columns / kPanelWide, sum, k, kPanelWide]: in the second one, as the sums
    float* sums;     // [rows / kPanelRows, sum, columns, kPanelRows]
};

// Calls run(the job of some columns, the first of these) until all have been: all rows of a turn meet them before
// others.
template <typename Run>
inline void each_slab(const LinearJob& job, std::int64_t most, const Run& run) {
    for (std::int64_t column = 0; column < job.columns; column += most) {
        run(some_columns(job, column, job.columns - column < most ? job.columns - column : most), column);
    }
}

// Of the blocks from `first` to `end`.
template <std::int64_t kSums>
inline void put_inputs(const LinearJob& job, std::int64_t first, std::int64_t end, float* to) {
    const std::int64_t blocks = job.weight.cols / kBlock, count = (end - first) * kBlock;
    for (std::int64_t column = 0; column < job.columns; column += kPanelWide, to += count * kPanelWide) {
        const auto load = [&](std::int64_t c, std::int64_t k) {
            if (kSums == 1) {
                return load8_bf16(job.bf16[input_at(column + c, blocks) + (first + k / kBlock) * kInputColumns].x +
                                  k % kBlock);
            }
            const std::int64_t there = column + c < job.columns ? column + c : job.columns - 1;
            return load8(job.x + there * job.x_stride + first * kBlock + k);
        };
        for (std::int64_t k = 0; k < count; k += 8) {
            F8 x[8];
#pragma GCC unroll 8
            for (int c = 0; c < 8; ++c) {
                x[c] = load(c, k);
            }
            transpose8(x);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                store8(to + (i % kSums * (count / kSums) + (k + i) / kSums) * kPanelWide, x[i]);
            }
        }
    }
}

template <Format kFormat, std::int64_t kSums>
void put_weights(const Weight& weight, std::int64_t row, std::int64_t tiles, std::int64_t first, std::int64_t end,
                 float* to) {
    const std::int64_t sums_apart = (end - first) * kBlock / kSums * tiles * Rows::kRows;
    const std::int64_t next = tiles * Rows::kRows / kGroupRows * (weight.cols / kBlock) * Part<kFormat>::kBytes;
    for (std::int64_t block = first; block < end; ++block, to += kBlock / kSums * tiles * Rows::kRows) {
        for (std::int64_t t = 0; t < tiles; ++t) {
            const Part<kFormat> at(weight, row + t * Rows::kRows);
            for (std::int64_t line = 0; line < Part<kFormat>::kBytes; line += 64) {
                fetch_second(at.line(block) + next + line);
            }
            decode_block<kFormat, Rows>(at, block, [&](int k, Rows::F value) {
                Rows::store(to + k % kSums * sums_apart + (k / kSums * tiles + t) * Rows::kRows, value);
            });
        }
    }
}

template <int kTiles, int kColumns>
inline void add_panels(const float* weights, const float* x, std::int64_t count, Rows::F (&sums)[kTiles][kColumns]) {
    for (; count > 0; --count, weights += kTiles * Rows::kRows, x += kPanelWide) {
        Rows::F w[kTiles];
#pragma GCC unroll 4
        for (int t = 0; t < kTiles; ++t) {
            w[t] = Rows::load(weights + t * Rows::kRows);
        }
#pragma GCC unroll 8
        for (int c = 0; c < kColumns; ++c) {
            const Rows::F input = Rows::set(x[c]);
#pragma GCC unroll 4
            for (int t = 0; t < kTiles; ++t) {
                sums[t][c] = Rows::fma(w[t], input, sums[t][c]);
            }
        }
    }
}

inline std::int64_t padded_columns(const LinearJob& job) {
    return (job.columns + kPanelWide - 1) / kPanelWide * kPanelWide;
}

// All columns of kTiles tiles of rows, of the blocks from `first` to `end`.
template <std::int64_t kSums, int kTiles>
void multiply_panels(const LinearJob& job, const Panels& panels, std::int64_t row, std::int64_t first, std::int64_t end,
                     float* kept) {
    constexpr std::int64_t kHigh = kTiles * Rows::kRows;
    const std::int64_t each = (end - first) * kBlock / kSums, apart = padded_columns(job) * kHigh;
    for (std::int64_t which = 0; which < kSums; ++which) {
        const bool last = end == job.weight.cols / kBlock && which == kSums - 1;
        each_columns<kPanelColumns>(job.columns, [&](auto width, std::int64_t column) {
            constexpr int kColumns = decltype(width)::kColumns;
            const std::int64_t wide = column / kPanelWide;
            float* at = kept + which * apart + column * kHigh;
            Rows::F sums[kTiles][kColumns];
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
                for (int t = 0; t < kTiles; ++t) {
                    sums[t][c] = first == 0 ? Rows::zero() : Rows::load(at + (c * kTiles + t) * Rows::kRows);
                }
            }
            add_panels<kTiles, kColumns>(
                panels.weights + which * each * kHigh,
                panels.inputs + (wide * kSums + which) * each * kPanelWide + column % kPanelWide, each, sums);
#pragma GCC unroll 8
            for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
                for (int t = 0; t < kTiles; ++t) {
                    float* sum = at + (c * kTiles + t) * Rows::kRows;
                    if (last) {
                        const Rows::F all = kSums == 2 ? Rows::add(Rows::load(sum - apart), sums[t][c]) : sums[t][c];
                        put_tile<Rows>(job, column + c, row + t * Rows::kRows, all);
                    } else {
                        Rows::store(sum, sums[t][c]);
                    }
                }
            }
        });
    }
}

template <std::int64_t kSums>
inline std::int64_t panels_scratch(const LinearJob& job) {
    const std::int64_t columns = padded_columns(job) < kPanelSlab ? padded_columns(job) : kPanelSlab;
    return kSums * kPanelNumbers * (kPanelRows + columns) + kTurnRows * columns;
}

template <Format kFormat, std::int64_t kSums>
void panels_turn(const LinearJob& job, std::int64_t first_row, std::int64_t end_row, float* room) {
    const std::int64_t blocks = job.weight.cols / kBlock, step = kSums * kPanelNumbers / kBlock;
    const std::int64_t columns = padded_columns(job);
    Panels panels{room, room + kSums * kPanelNumbers * kPanelRows, nullptr};
    panels.sums = panels.inputs + kSums * kPanelNumbers * columns;
    for (std::int64_t first = 0; first < blocks; first += step) {
        const std::int64_t end = first + step < blocks ? first + step : blocks;
        put_inputs<kSums>(job, first, end, panels.inputs);
        float* kept = panels.sums;
        std::int64_t row = first_row;
        for (; row + kPanelRows <= end_row; row += kPanelRows, kept += kSums * kPanelRows * columns) {
            put_weights<kFormat, kSums>(job.weight, row, kPanelTiles, first, end, panels.weights);
            multiply_panels<kSums, kPanelTiles>(job, panels, row, first, end, kept);
        }
        for (; row < end_row; row += Rows::kRows, kept += kSums * Rows::kRows * columns) {
            put_weights<kFormat, kSums>(job.weight, row, 1, first, end, panels.weights);
            multiply_panels<kSums, 1>(job, panels, row, first, end, kept);
        }
    }
}

template <Format kFormat, std::int64_t kSums>
void panels_product(const LinearJob& job, std::int64_t row, std::int64_t end, float* room) {
    each_slab(job, kPanelSlab, [&](const LinearJob& slab, std::int64_t) {
        for (std::int64_t first = row; first < end; first += kTurnRows / kSums) {
            const std::int64_t last = first + kTurnRows / kSums;
            panels_turn<kFormat, kSums>(slab, first, last < end ? last : end, room);
        }
    });
}
