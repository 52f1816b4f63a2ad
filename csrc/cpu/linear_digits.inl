// Products with weights of 8 and 4 bits whose inputs are two int8 digits: whole numbers within a block of 32, which are
// exact, times the scales of the weights and of the inputs.

// The scales of a block of weights, and what is added to each of its numbers times the scale: the minimum, or -8 scales
// for kQ4. For kQ8 nothing is added.
template <Format kFormat, typename R>
struct Scaling {
    using F = typename R::F;
    F scale, minimum;

    Scaling(const Part<kFormat>& at, std::int64_t block)
        : scale(R::halves(at.scales(block))),
          minimum(kFormat == Format::kQ4Mins ? R::halves(at.minimums(block)) : R::mul(scale, R::set(-8.0F))) {}
    F add(F sum, F dot, const InputBlock& input) const {
        sum = R::fma(R::mul(dot, R::set(input.scale)), scale, sum);
        return kFormat == Format::kQ8 ? sum : R::fma(minimum, R::set(input.scaled_sum), sum);
    }
};

// kColumns columns of R::kRows rows with rounded inputs: a block is decoded once for all columns.
template <Format kFormat, typename R, int kColumns>
inline void digit_tile(const LinearJob& job, std::int64_t row, std::int64_t column) {
    using F = typename R::F;
    using At = Part<kFormat>;
    const std::int64_t blocks = job.weight.cols / kBlock;
    const At at(job.weight, row);
    const InputBlock* inputs = job.digits + input_at(column, blocks);
    F sums[kColumns], dots[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
        sums[c] = R::zero();
    }
    for (std::int64_t block = 0; block < blocks; ++block, inputs += kInputColumns) {
        const std::uint8_t* p = at.numbers(block);
        const Scaling<kFormat, R> scaling(at, block);
        for (std::int64_t line = 0; column == 0 && line < At::kBytes; line += 64) {
            fetch_second(p + kAhead + line);
        }
        if (kFormat == Format::kQ8) {
            R::template dots8<kColumns>(p, inputs, dots);
        } else {
            R::template dots4<kColumns>(p, inputs, dots);
        }
#pragma GCC unroll 16
        for (int c = 0; c < kColumns; ++c) {
            sums[c] = scaling.add(sums[c], dots[c], inputs[c]);
        }
    }
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
        put_tile<R>(job, column + c, row, sums[c]);
    }
}

#if defined(OCTAVO_TILES)

constexpr TileShapes digit_shapes() {
    TileShapes shapes;
    return shapes.put(0, 16, 64).put(1, 16, 64).put(4, 16, kBlock).put(5, 16, kBlock).put(6, kBlock / 4, 64);
}

constexpr std::int64_t kFewestInTiles = 8;  // columns: fewer take less time one by one

// The numbers of a block as a tile of unsigned bytes: 8-bit ones where they are, 4-bit ones spread into `room`.
template <Format kFormat>
inline const std::uint8_t* spread(const std::uint8_t* numbers, std::uint8_t* room) {
    if (kFormat == Format::kQ8) {
        return numbers;
    }
    for (int i = 0; i < numbers_bytes(kFormat); ++i) {
        room[i] = numbers[i] & 15U;
        room[i + numbers_bytes(kFormat)] = static_cast<std::uint8_t>(numbers[i] >> 4);
    }
    return room;
}

// Up to kInputColumns columns of 16 rows, with the sums that digit_tile makes, to the bit. Tiles 0 and 1 are products
// of the high and the low digits, 4 and 5 the digits, 6 the weights.
template <Format kFormat>
inline void digit_tiles(Tiles& tiles, const LinearJob& job, std::int64_t row, std::int64_t column) {
    using R = Rows;
    using At = Part<kFormat>;
    constexpr int kParts = kGroupRows / R::kRows;
    const std::int64_t blocks = job.weight.cols / kBlock;
    const std::int64_t count = job.columns - column < kInputColumns ? job.columns - column : kInputColumns;
    const At at(job.weight, row);
    const InputBlock* inputs = job.digits + input_at(column, blocks);
    alignas(64) std::uint8_t room[kGroupRows * kBlock];
    alignas(64) std::int32_t high[kInputColumns][kGroupRows], low[kInputColumns][kGroupRows];
    typename R::F sums[kInputColumns][kParts];
    for (auto& sum : sums) {
        for (auto& part : sum) {
            part = R::zero();
        }
    }
    for (std::int64_t block = 0; block < blocks; ++block, inputs += kInputColumns) {
        for (std::int64_t line = 0; column == 0 && line < At::kBytes; line += 64) {
            fetch_second(at.numbers(block) + kAhead + line);
        }
        tiles.zero<0>();
        tiles.zero<1>();
        tiles.load<6>(spread<kFormat>(at.numbers(block), room), 64);
        tiles.load<4>(inputs->high, sizeof(InputBlock));
        tiles.add_bytes<0, 4, 6>();
        tiles.load<5>(inputs->low, sizeof(InputBlock));
        tiles.add_bytes<1, 5, 6>();
        tiles.store<0>(high, sizeof high[0]);
        tiles.store<1>(low, sizeof low[0]);
        for (int part = 0; part < kParts; ++part) {
            const Scaling<kFormat, R> scaling(At(job.weight, row + part * R::kRows), block);
#pragma GCC unroll 16
            for (std::int64_t c = 0; c < kInputColumns; ++c) {
                const std::uint32_t offset =
                    kFormat == Format::kQ8 ? 128U * static_cast<std::uint32_t>(inputs[c].sum) : 0;
                const auto dot = R::digits(high[c] + part * R::kRows, low[c] + part * R::kRows, offset);
                sums[c][part] = scaling.add(sums[c][part], dot, inputs[c]);
            }
        }
    }
    for (std::int64_t c = 0; c < count; ++c) {
        for (int part = 0; part < kParts && row + part * R::kRows < job.weight.rows; ++part) {
            put_tile<R>(job, column + c, row + part * R::kRows, sums[c][part]);
        }
    }
}

#endif

// Some columns times all rows of a turn: the inputs stay in the first cache, the weights in the second.
template <Format kFormat, int kColumns>
void digit_columns(const LinearJob& job, std::int64_t row, std::int64_t end, std::int64_t column) {
    for (; row < end; row += Rows::kRows) {
        digit_tile<kFormat, Rows, kColumns>(job, row, column);
    }
}

template <Format kFormat>
void digit_rows(const LinearJob& job, std::int64_t row, std::int64_t end) {
    std::int64_t first = 0;
#if defined(OCTAVO_TILES)
    static constexpr TileShapes kShapes = digit_shapes();
    Tiles tiles(kShapes);
    for (; first + kFewestInTiles <= job.columns; first += kInputColumns) {
        for (std::int64_t group = row; group < end; group += kGroupRows) {
            digit_tiles<kFormat>(tiles, job, group, first);
        }
    }
#endif
    each_columns<8>(job.columns - first, [&](auto count, std::int64_t column) {
        digit_columns<kFormat, decltype(count)::kColumns>(job, row, end, first + column);
    });
}
