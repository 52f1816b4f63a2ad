// Products with packed bfloat16 weights and inputs rounded to bfloat16, summed in float32.

void to_bf16_blocks(const float* x, std::int64_t count, Bf16Block* to) {
    for (std::int64_t block = 0; block < count / kBlock; ++block, x += kBlock, to += kInputColumns) {
        for (std::int64_t i = 0; i < kBlock; i += 8) {
            store8_bf16(to->x + i, load8(x + i));
        }
    }
}

// A tile of rows is multiplied with all columns, some at a time, before the next tile: that many passes over the rows.
// Each pass asks for its share of the next tile (one of `shares`), so that memory is read during all of them.

constexpr std::int64_t kSlabBytes = 512 << 10;  // of inputs that stay in the second cache, beside a turn's weights

// Calls run(the job of some columns, the first of these) until all have been: all rows of a turn meet them before
// others.
template <typename Run>
inline void each_slab(const LinearJob& job, std::int64_t most, const Run& run) {
    for (std::int64_t column = 0; column < job.columns; column += most) {
        LinearJob slab = job;
        slab.columns = job.columns - column < most ? job.columns - column : most;
        slab.bf16 += input_at(column, job.weight.cols / kBlock);
        slab.y += column * job.y_stride;
        run(slab, column);
    }
}

#if defined(OCTAVO_TILES)

constexpr std::int64_t kBf16TileRows = 2 * kGroupRows;

constexpr TileShapes bf16_shapes() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.put(tile, 16, 64);
    }
    return shapes;
}

// 16 * kWide columns of 16 * kHigh rows. Tiles 0 … 3 are sums, 4 and 5 inputs of the first and the second 16 columns, 6
// and 7 weights of the first and the second 16 rows.
template <int kWide, int kHigh>
inline void bf16_tiles(Tiles& tiles, const LinearJob& job, std::int64_t row, std::int64_t column, std::int64_t shares) {
    using At = Part<Format::kBf16Pairs>;
    const std::int64_t blocks = job.weight.cols / kBlock;
    const At first_rows(job.weight, row), second_rows(job.weight, kHigh == 2 ? row + kGroupRows : row);
    const Bf16Block* first = job.bf16 + input_at(column, blocks);
    const Bf16Block* second = job.bf16 + input_at(kWide == 2 ? column + kInputColumns : column, blocks);
    const std::int64_t columns =
        job.columns - column < kWide * kInputColumns ? job.columns - column : kWide * kInputColumns;
    const std::int64_t share = shares > 0 ? kHigh * blocks * At::kBytes / shares : 0, step = share / blocks;
    const std::uint8_t* next = first_rows.numbers(kHigh * blocks) + share * (column / (2 * kInputColumns));
    tiles.zero<0>();
    tiles.zero<1>();
    tiles.zero<2>();
    tiles.zero<3>();
    std::int64_t asked = 0;  // columns of y: writing to them would wait for the last cache
    for (std::int64_t block = 0; block < blocks;
         ++block, first += kInputColumns, second += kInputColumns, next += step) {
        for (std::int64_t line = 0; line < step; line += 64) {
            fetch_second(next + line);
        }
        for (; asked * blocks < (block + 1) * columns; ++asked) {
            const float* y = job.y + (column + asked) * job.y_stride + row;
            fetch(y);
            fetch(y + kGroupRows);
        }
        tiles.pass<4>(first, sizeof(Bf16Block));
        tiles.load<6>(first_rows.numbers(block), 64);
        tiles.add_bf16<0, 4, 6>();
        if constexpr (kHigh == 2) {
            tiles.load<7>(second_rows.numbers(block), 64);
            tiles.add_bf16<1, 4, 7>();
        }
        if constexpr (kWide == 2) {
            tiles.pass<5>(second, sizeof(Bf16Block));
            tiles.add_bf16<2, 5, 6>();
        }
        if constexpr (kWide == 2 && kHigh == 2) {
            tiles.add_bf16<3, 5, 7>();
        }
    }
    alignas(64) float sums[2][2][kInputColumns][kGroupRows];  // [16 columns, 16 rows, column, row]
    tiles.store<0>(sums[0][0], 64);
    tiles.store<1>(sums[0][1], 64);
    tiles.store<2>(sums[1][0], 64);
    tiles.store<3>(sums[1][1], 64);
    for (std::int64_t c = 0; c < columns; ++c) {
        for (std::int64_t r = 0; r < kHigh * kGroupRows && row + r < job.weight.rows; r += Rows::kRows) {
            const float* at = sums[c / kInputColumns][r / kGroupRows][c % kInputColumns] + r % kGroupRows;
            put_tile<Rows>(job, column + c, row + r, Rows::load(at));
        }
    }
}

// `first`: nothing has asked for the next rows yet.
template <int kHigh>
inline void bf16_columns(Tiles& tiles, const LinearJob& job, std::int64_t row, bool first) {
    const std::int64_t shares = first ? (job.columns + 2 * kInputColumns - 1) / (2 * kInputColumns) : 0;
    std::int64_t column = 0;
    for (; column + kInputColumns < job.columns; column += 2 * kInputColumns) {
        bf16_tiles<2, kHigh>(tiles, job, row, column, shares);
    }
    if (column < job.columns) {
        bf16_tiles<1, kHigh>(tiles, job, row, column, shares);
    }
}

void bf16_rows(const LinearJob& job, std::int64_t first_row, std::int64_t end, float*) {
    static constexpr TileShapes kShapes = bf16_shapes();
    constexpr std::int64_t kStep = 2 * kInputColumns;
    Tiles tiles(kShapes);
    const std::int64_t fits = kSlabBytes / (2 * job.weight.cols) / kStep * kStep;
    // Long rows leave the second cache whatever meets them first.
    each_slab(job, fits > kStep ? fits : job.columns, [&](const LinearJob& slab, std::int64_t column) {
        std::int64_t row = first_row;
        for (; row + kGroupRows < end; row += 2 * kGroupRows) {
            bf16_columns<2>(tiles, slab, row, column == 0);
        }
        if (row < end) {
            bf16_columns<1>(tiles, slab, row, column == 0);
        }
    });
}

std::int64_t bf16_scratch(const LinearJob&) { return 0; }

#else

// Tiles of rows side by side, and columns: as many sums as leave registers for weights and inputs.
#if defined(__AVX512BF16__)
constexpr int kBf16Tiles = 3, kBf16Columns = 8;
#elif defined(__AVX512VL__)
constexpr int kBf16Tiles = 2, kBf16Columns = 8;
#else
constexpr int kBf16Tiles = 2, kBf16Columns = 4;
#endif
constexpr std::int64_t kBf16TileRows = kBf16Tiles * Rows::kRows;

// kColumns columns of kTiles * R::kRows rows. `step` is how many bytes of the next tile are asked for per pair of k.
template <typename R, int kTiles, int kColumns, typename Block>
inline void bf16_tile(const LinearJob& job, const Block* all, std::int64_t row, std::int64_t column,
                      std::int64_t shares) {
    using At = Part<Format::kBf16Pairs>;
    const std::int64_t blocks = job.weight.cols / kBlock;
    const Block* inputs = all + input_at(column, blocks);
    const std::uint8_t* numbers[kTiles];
    typename R::F sums[kTiles][kColumns];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
        numbers[t] = At(job.weight, row + t * R::kRows).numbers(0);
#pragma GCC unroll 16
        for (int c = 0; c < kColumns; ++c) {
            sums[t][c] = R::zero();
        }
    }
    const std::int64_t tile = kTiles * R::kRows / kGroupRows * blocks * At::kBytes;
    const std::int64_t step = shares > 0 ? 64 * kTiles / shares : 0;
    const std::uint8_t* next = numbers[0] + tile + (shares > 0 ? tile / shares : 0) * (column / kBf16Columns);
    for (std::int64_t block = 0; block < blocks; ++block, inputs += kInputColumns) {
#pragma GCC unroll 4
        for (std::int64_t pair = 0; pair < kBlock / 2; ++pair, next += step) {
            fetch_second(next);
            if (step > 64) {
                fetch_second(next + 64);
                fetch_second(next + 128);
            }
            typename R::Pair pairs[kTiles];
#pragma GCC unroll 4
            for (int t = 0; t < kTiles; ++t) {
                pairs[t] = R::pair(numbers[t] + pair * 64);
            }
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                const typename R::Two two = R::two(inputs[c].x + 2 * pair);
#pragma GCC unroll 4
                for (int t = 0; t < kTiles; ++t) {
                    sums[t][c] = R::add_pair(sums[t][c], pairs[t], two);
                }
            }
        }
        for (auto& at : numbers) {
            at += At::kBytes;
        }
    }
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
#pragma GCC unroll 16
        for (int c = 0; c < kColumns; ++c) {
            put_tile<R>(job, column + c, row + t * R::kRows, sums[t][c]);
        }
    }
}

template <typename R, int kTiles, typename Block>
inline void bf16_columns(const LinearJob& job, const Block* inputs, std::int64_t row, bool first) {
    const std::int64_t shares = first ? (job.columns + kBf16Columns - 1) / kBf16Columns : 0;
    each_columns<kBf16Columns>(job.columns, [&](auto count, std::int64_t column) {
        bf16_tile<R, kTiles, decltype(count)::kColumns>(job, inputs, row, column, shares);
    });
}

template <typename Block>
inline void bf16_turn(const LinearJob& job, const Block* inputs, std::int64_t row, std::int64_t end, bool first) {
    for (; row + kBf16TileRows <= end; row += kBf16TileRows) {
        bf16_columns<Rows, kBf16Tiles>(job, inputs, row, first);
    }
    for (; row < end; row += Rows::kRows) {
        bf16_columns<Rows, 1>(job, inputs, row, first);
    }
}

#if defined(__AVX512BF16__) || !defined(__AVX512VL__)

std::int64_t bf16_scratch(const LinearJob&) { return 0; }
void bf16_rows(const LinearJob& job, std::int64_t row, std::int64_t end, float*) {
    bf16_turn(job, job.bf16, row, end, true);
}

#else

struct alignas(64) WidenedBlock {
    float x[kBlock];
};
constexpr std::int64_t kMostWidened = 8192;  // a turn of longer rows has too few of them

inline std::int64_t slab_columns(const LinearJob& job) {
    const std::int64_t fits = kSlabBytes / (4 * job.weight.cols) / kInputColumns * kInputColumns;
    return fits > 0 ? fits : kInputColumns;
}

inline const WidenedBlock* widen(const LinearJob& slab, float* room) {
    const std::int64_t blocks = slab.weight.cols / kBlock;
    auto* to = reinterpret_cast<WidenedBlock*>(room);
    for (std::int64_t column = 0; column < slab.columns; ++column) {
        for (std::int64_t block = 0; block < blocks; ++block) {
            const std::int64_t at = input_at(column, blocks) + block * kInputColumns;
            for (std::int64_t i = 0; i < kBlock; i += 8) {
                store8(to[at].x + i, load8_bf16(slab.bf16[at].x + i));
            }
        }
    }
    return to;
}

std::int64_t bf16_scratch(const LinearJob& job) {
    const std::int64_t most = slab_columns(job), columns = job.columns < most ? job.columns : most;
    return job.weight.cols > kMostWidened
               ? 0
               : (columns + kInputColumns - 1) / kInputColumns * kInputColumns * job.weight.cols;
}

// Inputs are widened once for the rows of a turn: with AVX2 that was no faster.
void bf16_rows(const LinearJob& job, std::int64_t row, std::int64_t end, float* room) {
    if (job.weight.cols > kMostWidened) {
        return bf16_turn(job, job.bf16, row, end, true);
    }
    each_slab(job, slab_columns(job), [&](const LinearJob& slab, std::int64_t column) {
        bf16_turn(slab, widen(slab, room), row, end, column == 0);
    });
}

#endif

#endif
