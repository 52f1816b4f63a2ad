// Products of numbers of 8 bits that have one scale for each row with inputs that have one for each token: sums of a
// chunk of columns are whole numbers, which are exact, and only these become floats. So all instruction sets compute
// the same bits.

constexpr std::int64_t kRowBytes = block_bytes(Format::kQ8Rows);
using RowPart = Part<Format::kQ8Rows>;

// The sum of all chunks as a result.
template <typename R>
inline typename R::F scaled(typename R::F sum, const InputBlock& input, const RowPart& at) {
    return R::mul(R::mul(sum, R::set(input.scale)), scale_of<Format::kQ8Rows, R>(at, 0));
}

// Calls run(the first block of a chunk, how many it has) for all chunks, in order.
template <typename Run>
__attribute__((always_inline)) inline void each_chunk(std::int64_t blocks, const Run& run) {
    for (std::int64_t block = 0; block < blocks; block += kChunkBlocks) {
        run(block, blocks - block < kChunkBlocks ? blocks - block : kChunkBlocks);
    }
}

#if defined(__AVX512VNNI__)
constexpr int kRowTiles = 2;  // of rows, which share the loads of inputs
#else
constexpr int kRowTiles = 1;
#endif

#if defined(__AVX512VNNI__)

// A chunk's sums of kTiles tiles of rows and kColumns columns.
template <int kDigits, int kTiles, int kColumns>
struct ChunkSums {
    __m512i high[kTiles][kColumns], low[kTiles][kColumns];

    // Makes up for the offset of unsigned bytes. `last` is the last block of the chunk.
    __attribute__((always_inline)) void begin(const InputBlock* last) {
#pragma GCC unroll 16
        for (int c = 0; c < kColumns; ++c) {
            const auto offset = 0U - 128U * static_cast<std::uint32_t>(last[c].first_sum);
#pragma GCC unroll 4
            for (int t = 0; t < kTiles; ++t) {
                high[t][c] = _mm512_setzero_si512();
                low[t][c] = _mm512_set1_epi32(static_cast<std::int32_t>(offset));
            }
        }
    }
    __attribute__((always_inline)) void add(const __m512i (&weights)[kTiles], const InputBlock* inputs, int first) {
#pragma GCC unroll 16
        for (int c = 0; c < kColumns; ++c) {
            const __m512i x = Rows16::four(inputs[c].low + first);
#pragma GCC unroll 4
            for (int t = 0; t < kTiles; ++t) {
                low[t][c] = _mm512_dpbusd_epi32(low[t][c], weights[t], x);
            }
        }
#pragma GCC unroll 16
        for (int c = 0; kDigits == 2 && c < kColumns; ++c) {
            const __m512i x = Rows16::four(inputs[c].high + first);
#pragma GCC unroll 4
            for (int t = 0; t < kTiles; ++t) {
                high[t][c] = _mm512_dpbusd_epi32(high[t][c], weights[t], x);
            }
        }
    }
    __attribute__((always_inline)) __m512 sum(int t, int c) const {
        static_assert(kDigit == 1 << 7);
        return _mm512_cvtepi32_ps(kDigits == 1 ? low[t][c]
                                               : _mm512_add_epi32(_mm512_slli_epi32(high[t][c], 7), low[t][c]));
    }
};

// kTiles tiles of rows and kColumns columns.
template <int kDigits, int kTiles, int kColumns>
struct RowTile {
    const LinearJob& job;
    std::int64_t row, column;
    __m512 sums[kTiles][kColumns];

    __attribute__((always_inline)) RowTile(const LinearJob& the_job, std::int64_t first_row, std::int64_t first_column)
        : job(the_job), row(first_row), column(first_column) {
        each([](__m512& sum, int, int) { sum = _mm512_setzero_ps(); });
    }
    template <typename Run>
    __attribute__((always_inline)) void each(const Run& run) {
#pragma GCC unroll 16
        for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 4
            for (int t = 0; t < kTiles; ++t) {
                run(sums[t][c], t, c);
            }
        }
    }
    const InputBlock* inputs() const { return job.digits + input_at(column, job.weight.cols / kBlock); }

    __attribute__((always_inline)) void add_chunk(std::int64_t first, std::int64_t count) {
        const std::int64_t apart = group_bytes(Format::kQ8Rows, job.weight.cols);
        const RowPart at(job.weight, row);
        ChunkSums<kDigits, kTiles, kColumns> chunk;
        const InputBlock* x = inputs() + first * kInputColumns;
        chunk.begin(x + (count - 1) * kInputColumns);
        for (std::int64_t block = first; block < first + count; ++block, x += kInputColumns) {
            const std::uint8_t* numbers = at.numbers(block);
            for (std::int64_t line = 0; column == 0 && line < kRowBytes; line += 64) {
#pragma GCC unroll 4
                for (int t = 0; t < kTiles; ++t) {
                    fetch_second(numbers + t * apart + kAhead + line);
                }
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) {
                __m512i weights[kTiles];
#pragma GCC unroll 4
                for (int t = 0; t < kTiles; ++t) {
                    weights[t] = _mm512_loadu_si512(numbers + t * apart + 64 * i);
                }
                chunk.add(weights, x, 4 * i);
            }
        }
        each([&](__m512& sum, int t, int c)
                 __attribute__((always_inline)) { sum = _mm512_add_ps(sum, chunk.sum(t, c)); });
    }
    __attribute__((always_inline)) void finish() {
        each([&](__m512& sum, int t, int c) __attribute__((always_inline)) {
            const std::int64_t first = row + t * kGroupRows;
            put_tile<Rows16>(job, column + c, first, scaled<Rows16>(sum, inputs()[c], {job.weight, first}));
        });
    }
};

// Calls run(Columns<tiles>, the first row) until all rows have been.
template <typename Run>
inline void each_tiles(std::int64_t row, std::int64_t end, const Run& run) {
    for (; row + (kRowTiles - 1) * kGroupRows < end; row += kRowTiles * kGroupRows) {
        run(Columns<kRowTiles>{}, row);
    }
    for (; row < end; row += kGroupRows) {
        run(Columns<1>{}, row);
    }
}

constexpr std::int64_t kKeptRows = 512;

// All rows of a turn meet a chunk of inputs, which the first cache keeps, before the next chunk.
template <int kDigits, int kColumns>
__attribute__((noinline)) void row_band(const LinearJob& job, std::int64_t row, std::int64_t end, std::int64_t column) {
    alignas(64) float kept[kKeptRows * kColumns];
    const std::int64_t blocks = job.weight.cols / kBlock;
    each_chunk(blocks, [&](std::int64_t first, std::int64_t count) {
        each_tiles(row, end, [&](auto tiles, std::int64_t at) {
            RowTile<kDigits, decltype(tiles)::kColumns, kColumns> tile(job, at, column);
            float* sums = kept + (at - row) * kColumns;
            if (first > 0) {
                tile.each([&](__m512& sum, int t, int c)
                              __attribute__((always_inline)) { sum = _mm512_load_ps(sums + 16 * (t * kColumns + c)); });
            }
            tile.add_chunk(first, count);
            if (first + count == blocks) {
                return tile.finish();
            }
            tile.each([&](__m512& sum, int t, int c)
                          __attribute__((always_inline)) { _mm512_store_ps(sums + 16 * (t * kColumns + c), sum); });
        });
    });
}

template <int kDigits, int kColumns>
__attribute__((noinline)) void row_columns(const LinearJob& job, std::int64_t row, std::int64_t end,
                                           std::int64_t column) {
    const std::int64_t blocks = job.weight.cols / kBlock;
    if (job.columns > kInputColumns && blocks > kChunkBlocks) {
        for (; row < end; row += kKeptRows) {
            row_band<kDigits, kColumns>(job, row, row + kKeptRows < end ? row + kKeptRows : end, column);
        }
        return;
    }
    each_tiles(row, end, [&](auto tiles, std::int64_t at) {
        RowTile<kDigits, decltype(tiles)::kColumns, kColumns> tile(job, at, column);
        each_chunk(blocks, [&](std::int64_t first, std::int64_t count)
                               __attribute__((always_inline)) { tile.add_chunk(first, count); });
        tile.finish();
    });
}

#elif defined(__AVX2__)

// Eight rows of a column or two: digits apart, so that weights need not be spread.
template <int kDigits, int kColumns>
__attribute__((noinline)) void row_columns(const LinearJob& job, std::int64_t row, std::int64_t end,
                                           std::int64_t column) {
    const std::int64_t blocks = job.weight.cols / kBlock;
    const InputBlock* inputs = job.digits + input_at(column, blocks);
    for (; row < end; row += Rows8::kRows) {
        const RowPart at(job.weight, row);
        F8 sums[kColumns];
        for (F8& sum : sums) {
            sum = zero8();
        }
        each_chunk(blocks, [&](std::int64_t first, std::int64_t count) {
            __m256i high[kColumns], low[kColumns];
            for (int c = 0; c < kColumns; ++c) {
                high[c] = low[c] = _mm256_setzero_si256();
            }
            for (std::int64_t block = first; block < first + count; ++block) {
                for (std::int64_t line = 0; column == 0 && line < kRowBytes; line += 64) {
                    fetch_second(at.line(block) + kAhead + line);
                }
                const Bytes numbers = bytes_of(at.numbers(block));
                for (int c = 0; c < kColumns; ++c) {
                    const InputBlock& x = inputs[block * kInputColumns + c];
                    low[c] = _mm256_add_epi32(low[c], whole_dot(numbers, x.low));
                    high[c] = kDigits == 2 ? _mm256_add_epi32(high[c], whole_dot(numbers, x.high)) : high[c];
                }
            }
            for (int c = 0; c < kColumns; ++c) {
                static_assert(kDigit == 1 << 7);
                const __m256i whole = _mm256_add_epi32(_mm256_slli_epi32(high[c], 7), low[c]);
                sums[c] = add8(sums[c], _mm256_cvtepi32_ps(whole));
            }
        });
        for (int c = 0; c < kColumns; ++c) {
            put_tile<Rows8>(job, column + c, row, scaled<Rows8>(sums[c], inputs[c], at));
        }
    }
}

#endif

#if defined(OCTAVO_TILES)

// Up to kInputColumns columns of 16 rows. Tiles 0 and 1 are products of the low and the high digits of a chunk, 2 and 3
// digits, 4 weights.
constexpr TileShapes row_shapes() {
    TileShapes shapes;
    return shapes.put(0, 16, 64).put(1, 16, 64).put(2, 16, kBlock).put(3, 16, kBlock).put(4, kBlock / 4, 64);
}

template <int kDigits>
inline void tiled_rows(Tiles& tiles, const LinearJob& job, std::int64_t row, std::int64_t column) {
    using R = Rows;
    constexpr int kParts = kGroupRows / R::kRows;
    const std::int64_t blocks = job.weight.cols / kBlock;
    const InputBlock* inputs = job.digits + input_at(column, blocks);
    const RowPart at(job.weight, row);
    alignas(64) std::int32_t high[kInputColumns][kGroupRows] = {}, low[kInputColumns][kGroupRows];
    typename R::F sums[kInputColumns][kParts];
    for (auto& parts : sums) {
        for (auto& sum : parts) {
            sum = R::zero();
        }
    }
    each_chunk(blocks, [&](std::int64_t first, std::int64_t count) {
        tiles.zero<0>();
        tiles.zero<1>();
        for (std::int64_t block = first; block < first + count; ++block) {
            for (std::int64_t line = 0; column == 0 && line < kRowBytes; line += 64) {
                fetch_second(at.line(block) + kAhead + line);
            }
            const InputBlock* x = inputs + block * kInputColumns;
            tiles.load<4>(at.numbers(block), 64);
            tiles.load<2>(x->low, sizeof(InputBlock));
            tiles.add_bytes<0, 2, 4>();
            if (kDigits == 2) {
                tiles.load<3>(x->high, sizeof(InputBlock));
                tiles.add_bytes<1, 3, 4>();
            }
        }
        tiles.store<0>(low, sizeof low[0]);
        if (kDigits == 2) {
            tiles.store<1>(high, sizeof high[0]);
        }
        const InputBlock* last = inputs + (first + count - 1) * kInputColumns;
        for (int c = 0; c < kInputColumns; ++c) {
            for (int part = 0; part < kParts; ++part) {
                const auto sum = R::digits(high[c] + part * R::kRows, low[c] + part * R::kRows, last[c].first_sum);
                sums[c][part] = R::add(sums[c][part], sum);
            }
        }
    });
    for (int c = 0; c < kInputColumns && column + c < job.columns; ++c) {
        for (int part = 0; part < kParts && row + part * R::kRows < job.weight.rows; ++part) {
            const std::int64_t first = row + part * R::kRows;
            put_tile<R>(job, column + c, first, scaled<R>(sums[c][part], inputs[c], {job.weight, first}));
        }
    }
}

#endif

template <int kDigits>
void scaled_rows(const LinearJob& job, std::int64_t row, std::int64_t end, [[maybe_unused]] float* scratch) {
    std::int64_t first = 0;
#if defined(OCTAVO_TILES)
    static constexpr TileShapes kShapes = row_shapes();
    if (first + kFewestInTiles <= job.columns) {
        Tiles tiles(kShapes);
        for (; first + kFewestInTiles <= job.columns; first += kInputColumns) {
            for (std::int64_t group = row; group < end; group += kGroupRows) {
                tiled_rows<kDigits>(tiles, job, group, first);
            }
        }
    }
#endif
#if !defined(__AVX512VNNI__)
    if (job.columns - first >= kFewestWide<Format::kQ8Rows>) {
        return wide_rows<Format::kQ8Rows>(job, row, end, first, scratch);
    }
#endif
#if defined(__AVX2__)
    constexpr int kMost = kDigits == 1 ? 8 : 4;
    each_columns<kMost>(job.columns - first, [&](auto count, std::int64_t column) {
        row_columns<kDigits, decltype(count)::kColumns>(job, row, end, first + column);
    });
#endif
}
