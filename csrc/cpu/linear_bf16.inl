// Products with packed bfloat16 weights and inputs rounded to bfloat16, summed in float32.

void to_bf16_blocks(const float* x, std::int64_t count, Bf16Block* to) {
    for (std::int64_t block = 0; block < count / kBlock; ++block, x += kBlock, to += kInputColumns) {
        for (std::int64_t i = 0; i < kBlock; i += 8) {
            store8_bf16(to->x + i, load8(x + i));
        }
    }
}

#if defined(OCTAVO_TILES)

constexpr std::int64_t kBf16TileRows = 2 * kGroupRows;

// What the caches keep decides how fast tiles are multiplied: the third one gives 10 bytes a cycle, the second one 50.
// Of many columns, long rows are therefore multiplied in chunks of k: 32 rows of a chunk stay in the first cache while
// columns pass. In the second one stay the inputs, or, where these are too many, those of a chunk and the sums of a
// high band of rows.
constexpr std::int64_t kFewColumns = 2 * kInputColumns, kChunkBlocks = 18;
constexpr std::int64_t kSlabBytes = 1 << 20, kSlabColumns = 256;
constexpr std::int64_t kBandRows = 64, kHighBandRows = 256;

inline bool in_chunks(std::int64_t columns, std::int64_t blocks) {
    return columns > kFewColumns && blocks > kChunkBlocks;
}

constexpr TileShapes bf16_shapes() {
    TileShapes shapes;
    for (int tile = 0; tile < 8; ++tile) {
        shapes.put(tile, 16, 64);
    }
    return shapes;
}

// Blocks of all columns that are multiplied with 16 * kHigh rows, and what comes after them: rows, from a block on.
// Where it is not all blocks, sums are kept between chunks.
struct Chunk {
    std::int64_t first, end;
    std::int64_t next_row, next_block;
    float* sums;
};

// 16 * kWide columns of 16 * kHigh rows. Tiles 0 … 3 are sums, 4 and 5 inputs of the first and the second 16 columns, 6
// and 7 weights of the first and the second 16 rows.
template <int kWide, int kHigh>
inline void bf16_tiles(Tiles& tiles, const LinearJob& job, std::int64_t row, std::int64_t column, const Chunk& chunk) {
    using At = Part<Format::kBf16Pairs>;
    constexpr std::int64_t kTile = kInputColumns * kGroupRows;
    const std::int64_t blocks = job.weight.cols / kBlock, count = chunk.end - chunk.first;
    const At first_rows(job.weight, row), second_rows(job.weight, kHigh == 2 ? row + kGroupRows : row);
    const Bf16Block* first = job.bf16 + input_at(column, blocks) + chunk.first * kInputColumns;
    const Bf16Block* second = kWide == 2 ? first + blocks * kInputColumns : first;
    const std::int64_t columns =
        job.columns - column < kWide * kInputColumns ? job.columns - column : kWide * kInputColumns;
    // Each pass over the rows asks for its share of what comes next, so that memory is read during all of them.
    const std::int64_t shares = (job.columns + 2 * kInputColumns - 1) / (2 * kInputColumns);
    const std::int64_t group = count * At::kBytes, step = kHigh * At::kBytes / shares;
    const std::int64_t from = kHigh * group / shares * (column / (2 * kInputColumns));
    const std::uint8_t* next =
        At(job.weight, chunk.next_row + from / group * kGroupRows).numbers(chunk.next_block) + from % group;
    const bool last = chunk.end == blocks;
    float* sums = chunk.sums != nullptr ? chunk.sums + column * 2 * kGroupRows : nullptr;
    if (chunk.first == 0) {
        tiles.zero<0>();
        tiles.zero<1>();
        tiles.zero<2>();
        tiles.zero<3>();
    } else {
        tiles.pass<0>(sums, 64);
        tiles.pass<1>(sums + kTile, 64);
        tiles.pass<2>(sums + 2 * kTile, 64);
        tiles.pass<3>(sums + 3 * kTile, 64);
    }
    std::int64_t asked = last ? 0 : columns;  // columns of y: writing to them would wait for the last cache
    for (std::int64_t block = chunk.first, done = 1; block < chunk.end;
         ++block, ++done, first += kInputColumns, second += kInputColumns, next += step) {
        for (std::int64_t line = 0; line < step; line += 64) {
            fetch_second(next + line);
        }
        for (; asked * count < done * columns; ++asked) {
            const float* y = job.y + (column + asked) * job.y_stride + row;
            fetch_second(y);
            fetch_second(y + kGroupRows);
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
    const auto store = [&](float* to, std::int64_t stride, std::int64_t down, std::int64_t right) {
        tiles.store<0>(to, stride);
        if constexpr (kHigh == 2) {
            tiles.store<1>(to + down, stride);
        }
        if constexpr (kWide == 2) {
            tiles.store<2>(to + right, stride);
        }
        if constexpr (kWide == 2 && kHigh == 2) {
            tiles.store<3>(to + right + down, stride);
        }
    };
    if (!last) {
        return store(sums, 64, kTile, 2 * kTile);
    }
    const bool whole = columns == kWide * kInputColumns && row + kHigh * kGroupRows <= job.weight.rows;
    if (whole && job.bias == nullptr && !job.accumulate) {
        float* y = job.y + column * job.y_stride + row;
        return store(y, 4 * job.y_stride, kGroupRows, kInputColumns * job.y_stride);
    }
    alignas(64) float all[2][2][kInputColumns][kGroupRows];  // [16 columns, 16 rows, column, row]
    store(all[0][0][0], 64, kTile, 2 * kTile);
    for (std::int64_t c = 0; c < columns; ++c) {
        for (std::int64_t r = 0; r < kHigh * kGroupRows && row + r < job.weight.rows; r += Rows::kRows) {
            const float* at = all[c / kInputColumns][r / kGroupRows][c % kInputColumns] + r % kGroupRows;
            put_tile<Rows>(job, column + c, row + r, Rows::load(at));
        }
    }
}

template <int kHigh>
inline void bf16_columns(Tiles& tiles, const LinearJob& job, std::int64_t row, const Chunk& chunk) {
    std::int64_t column = 0;
    for (; column + kInputColumns < job.columns; column += 2 * kInputColumns) {
        bf16_tiles<2, kHigh>(tiles, job, row, column, chunk);
    }
    if (column < job.columns) {
        bf16_tiles<1, kHigh>(tiles, job, row, column, chunk);
    }
}

inline std::int64_t whole_columns(const LinearJob& job) {
    return (job.columns + 2 * kInputColumns - 1) / (2 * kInputColumns) * (2 * kInputColumns);
}

inline Division bf16_division(const Weight& weight, std::int64_t most_rows, std::int64_t columns) {
    constexpr std::int64_t kWide = 2 * kInputColumns;
    const bool many = in_chunks(columns, weight.cols / kBlock);
    const std::int64_t fits = many ? kSlabColumns : kSlabBytes / row_bytes(weight);
    const std::int64_t slabs = (columns + fits - 1) / fits, wide = (columns + slabs * kWide - 1) / (slabs * kWide);
    return {kBf16TileRows, many ? kHighBandRows : most_rows, wide * kWide};
}

std::int64_t bf16_scratch(const LinearJob& job) {
    return in_chunks(job.columns, job.weight.cols / kBlock) ? kHighBandRows * whole_columns(job) : 0;
}

void bf16_rows(const LinearJob& job, std::int64_t first_row, std::int64_t end, float* sums) {
    static constexpr TileShapes kShapes = bf16_shapes();
    Tiles tiles(kShapes);
    const std::int64_t blocks = job.weight.cols / kBlock;
    const bool many = in_chunks(job.columns, blocks);
    const std::int64_t chunks = many ? (blocks + kChunkBlocks - 1) / kChunkBlocks : 1;
    const bool fit = job.columns * row_bytes(job.weight) <= kSlabBytes;
    const std::int64_t band = !many ? end - first_row : fit ? kBandRows : kHighBandRows;
    for (; first_row < end; first_row += band) {
        const std::int64_t band_end = first_row + band < end ? first_row + band : end;
        for (std::int64_t part = 0; part < chunks; ++part) {
            Chunk chunk{blocks * part / chunks, blocks * (part + 1) / chunks, 0, 0, nullptr};
            for (std::int64_t row = first_row; row < band_end; row += kBf16TileRows) {
                const bool over = row + kBf16TileRows >= band_end, again = over && chunk.end < blocks;
                chunk.next_row = again ? first_row : row + kBf16TileRows;
                chunk.next_block = over ? chunk.end % blocks : chunk.first;
                chunk.sums = many ? sums + (row - first_row) * whole_columns(job) : nullptr;
                row + kGroupRows < band_end ? bf16_columns<2>(tiles, job, row, chunk)
                                            : bf16_columns<1>(tiles, job, row, chunk);
            }
        }
    }
}

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

// A tile of rows is multiplied with all columns, some at a time, before the next tile: that many passes over the rows.
// Each pass asks for its share of the next tile (one of `shares`), so that memory is read during all of them.

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

#if defined(__AVX512BF16__) || !defined(__AVX2__)

std::int64_t bf16_scratch(const LinearJob&) { return 0; }
void bf16_rows(const LinearJob& job, std::int64_t row, std::int64_t end, float*) {
    bf16_turn(job, job.bf16, row, end, true);
}

#else

#define OCTAVO_BF16_PANELS 1

constexpr std::int64_t kMostWidened = 8192;  // of few columns: a turn of longer rows has too few of them

inline bool bf16_in_panels(std::int64_t columns, std::int64_t cols) {
    return columns >= (kPanelColumns == 4 ? 16 : cols > kMostWidened ? 32 : 64);
}

#if defined(__AVX512VL__)

// Of few columns, inputs alone are widened, once for the rows of a turn.
constexpr std::int64_t kSlabBytes = 512 << 10;  // of inputs that stay in the second cache, beside a turn's weights

struct alignas(64) WidenedBlock {
    float x[kBlock];
};

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

inline std::int64_t few_scratch(const LinearJob& job) {
    const std::int64_t most = slab_columns(job), columns = job.columns < most ? job.columns : most;
    return job.weight.cols > kMostWidened
               ? 0
               : (columns + kInputColumns - 1) / kInputColumns * kInputColumns * job.weight.cols;
}

inline void few_columns(const LinearJob& job, std::int64_t row, std::int64_t end, float* room) {
    if (job.weight.cols > kMostWidened) {
        return bf16_turn(job, job.bf16, row, end, true);
    }
    each_slab(job, slab_columns(job), [&](const LinearJob& slab, std::int64_t column) {
        bf16_turn(slab, widen(slab, room), row, end, column == 0);
    });
}

#else

inline std::int64_t few_scratch(const LinearJob&) { return 0; }
inline void few_columns(const LinearJob& job, std::int64_t row, std::int64_t end, float*) {
    bf16_turn(job, job.bf16, row, end, true);
}

#endif

std::int64_t bf16_scratch(const LinearJob& job) {
    return bf16_in_panels(job.columns, job.weight.cols) ? panels_scratch<1>(job) : few_scratch(job);
}

void bf16_rows(const LinearJob& job, std::int64_t row, std::int64_t end, float* room) {
    bf16_in_panels(job.columns, job.weight.cols) ? panels_product<Format::kBf16Pairs, 1>(job, row, end, room)
                                                 : few_columns(job, row, end, room);
}

#endif

#endif
