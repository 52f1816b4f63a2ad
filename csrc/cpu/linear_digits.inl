// Products with weights of 3 to 8 bits whose inputs are two int8 digits, or one: whole numbers within a block of 32,
// which are exact, times the scales of the weights and of the inputs.

// The scales of a block of weights (or of half of it), and what is added to each of its numbers times the scale: the
// minimum, or what makes up for the offset of unsigned numbers. Nothing is added where numbers have their sign.
template <Format kFormat, typename R>
struct Scaling {
    using F = typename R::F;
    F scale, minimum;

    Scaling(const Part<kFormat>& at, std::int64_t block, int half = 0)
        : scale(scale_of<kFormat, R>(at, block, half)),
          minimum(has_minimums(kFormat) ? minimum_of<kFormat, R>(at, block)
                                        : R::mul(scale, R::set(-offset_of(kFormat)))) {}
    F add(F sum, F dot, const InputBlock& input) const {
        sum = R::fma(R::mul(dot, R::set(input.scale)), scale, sum);
        return has_signed_numbers(kFormat) ? sum : R::fma(minimum, R::set(input.scaled_sum), sum);
    }
};

// Adds a block's products (or those of half of it) to the sums of kColumns columns.
template <Format kFormat, int kDigits, int kHalf, typename R, int kColumns>
__attribute__((always_inline)) inline void add_block(const Part<kFormat>& at, std::int64_t block,
                                                     const InputBlock* inputs, typename R::F* sums) {
    typename R::F dots[kColumns];
    const std::uint8_t* p = at.numbers(block);
    const Scaling<kFormat, R> scaling(at, block, kHalf);
    if (kFormat == Format::kQ8) {
        R::template dots8<kDigits, kColumns>(p, inputs, dots);
    } else if (kFormat == Format::kQ3K) {
        R::template dots3<kDigits, kHalf, kColumns>(p, at.high(block), inputs, dots);
    } else if (has_half_scales(kFormat)) {
        R::template dots6<kDigits, kHalf, kColumns>(p, at.high(block), inputs, dots);
    } else if (high_bits(kFormat) == 1) {
        R::template dots5<kDigits, kColumns>(p, at.high(block), inputs, dots);
    } else if constexpr (has_codes(kFormat)) {
        R::template dots_of_codes<kFormat, kDigits, kColumns>(p, inputs, dots);
    } else {
        R::template dots4<kDigits, kColumns>(p, inputs, dots);
    }
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
        sums[c] = scaling.add(sums[c], dots[c], inputs[c]);
    }
}

// kColumns columns of R::kRows rows with rounded inputs: a block is decoded once for all columns.
template <Format kFormat, int kDigits, typename R, int kColumns>
inline void digit_tile(const LinearJob& job, std::int64_t row, std::int64_t column) {
    using F = typename R::F;
    using At = Part<kFormat>;
    const std::int64_t blocks = job.weight.cols / kBlock;
    const At at(job.weight, row);
    const InputBlock* inputs = job.digits + input_at(column, blocks);
    F sums[kColumns];
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
        sums[c] = R::zero();
    }
    LowRankTile<kColumns> adapters(job, column, kColumns, row, R::kRows, blocks);
    for (std::int64_t block = 0; block < blocks; ++block, inputs += kInputColumns) {
        adapters.fetch_some();
        for (std::int64_t line = 0; column == 0 && line < At::kBytes; line += 64) {
            fetch_second(at.line(block) + kAhead + line);
        }
        add_block<kFormat, kDigits, 0, R, kColumns>(at, block, inputs, sums);
        if (has_half_scales(kFormat)) {
            add_block<kFormat, kDigits, 1, R, kColumns>(at, block, inputs, sums);
        }
    }
#pragma GCC unroll 16
    for (int c = 0; c < kColumns; ++c) {
        put_tile<R>(job, column + c, row, sums[c]);
    }
    adapters.add(job, column, kColumns, row, R::kRows);
}

#if defined(OCTAVO_TILES)

constexpr TileShapes digit_shapes() {
    TileShapes shapes;
    for (int sum = 0; sum < 4; ++sum) {
        shapes.put(sum, 16, 64);
    }
    return shapes.put(4, 16, kBlock).put(5, 16, kBlock).put(6, kBlock / 4, 64);
}

constexpr std::int64_t kFewestInTiles = 12;  // columns: fewer take less time one by one

// The numbers of a block of codes.
template <Format kFormat>
inline const std::uint8_t* spread_codes(const std::uint8_t* codes, std::uint8_t* room) {
    constexpr std::int64_t kHalf = numbers_bytes(kFormat);
#if defined(__AVX512BW__)
    const __m512i table = _mm512_broadcast_i32x4(unsigned_codes<kFormat>());
    for (std::int64_t i = 0; i < kHalf; i += 64) {
        const __m512i both = _mm512_loadu_si512(codes + i), mask = _mm512_set1_epi8(15);
        _mm512_storeu_si512(room + i, _mm512_shuffle_epi8(table, _mm512_and_si512(both, mask)));
        const __m512i next = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
        _mm512_storeu_si512(room + kHalf + i, _mm512_shuffle_epi8(table, next));
    }
#else
    for (std::int64_t i = 0; i < kHalf; ++i) {
        room[i] = kUnsignedCodes<kFormat>.numbers[codes[i] & 15U];
        room[i + kHalf] = kUnsignedCodes<kFormat>.numbers[codes[i] >> 4];
    }
#endif
    return room;
}

// The numbers of a block as a tile of unsigned bytes: 8-bit ones where they are, narrower ones spread into `room`.
template <Format kFormat>
inline const std::uint8_t* spread(const Part<kFormat>& at, std::int64_t block, std::uint8_t* room) {
    const std::uint8_t* numbers = at.numbers(block);
    if (has_bytes(kFormat)) {
        return numbers;
    }
    constexpr std::int64_t kHalf = numbers_bytes(kFormat);
    if constexpr (has_codes(kFormat)) {
        return spread_codes<kFormat>(numbers, room);
    }
    for (std::int64_t i = 0; i < kHalf; ++i) {
        room[i] = numbers[i] & 15U;
        room[i + kHalf] = static_cast<std::uint8_t>(numbers[i] >> 4);
    }
    const std::uint8_t* high = at.high(block);
    for (int piece = 0; high_bits(kFormat) == 1 && piece < 8; ++piece) {
        for (std::int64_t i = 0; i < 64; ++i) {
            room[64 * piece + i] |= static_cast<std::uint8_t>((high[i] >> piece & 1U) << 4);
        }
    }
    return room;
}

// Up to kInputColumns columns of 16 rows, with the sums that digit_tile makes, to the bit. Tiles are written to memory
// and read back by other instructions, which takes until the writes are done: so a block's numbers are spread two
// blocks before their products are summed up, and multiplied one block before. Tiles 0 and 1 are products of the high
// and the low digits of blocks with an even number, 2 and 3 of the others; 4 and 5 are digits, 6 weights. A single
// digit is a low one.
template <Format kFormat, int kDigits>
class DigitTiles {
  public:
    DigitTiles(Tiles& tiles, const LinearJob& job, std::int64_t row, std::int64_t column)
        : tiles_(tiles),
          job_(job),
          row_(row),
          column_(column),
          at_(job.weight, row),
          inputs_(job.digits + input_at(column, job.weight.cols / kBlock)) {}

    void operator()() {
        const std::int64_t blocks = job_.weight.cols / kBlock;
        typename R::F sums[kInputColumns][kParts];
#pragma GCC unroll 16
        for (int c = 0; c < kInputColumns; ++c) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                sums[c][part] = R::zero();
            }
        }
        make_ready(0);
        if (blocks > 1) {
            make_ready(1);
        }
        multiply<0, 1>(0);
        for (std::int64_t block = 0; block < blocks; ++block) {
            if (block + 2 < blocks) {
                make_ready(block + 2);
            }
            if (block + 1 < blocks) {
                block % 2 != 0 ? multiply<0, 1>(block + 1) : multiply<2, 3>(block + 1);
            }
            add(block, sums);
        }
#pragma GCC unroll 16
        for (int c = 0; c < kInputColumns; ++c) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                if (column_ + c < job_.columns && row_ + part * R::kRows < job_.weight.rows) {
                    put_tile<R>(job_, column_ + c, row_ + part * R::kRows, sums[c][part]);
                }
            }
        }
        const std::int64_t left = job_.columns - column_, columns = left < kInputColumns ? left : kInputColumns;
        LowRankTile<kInputColumns>(job_, column_, columns, row_, kGroupRows, 1)
            .add(job_, column_, columns, row_, kGroupRows);
    }

  private:
    using R = Rows;
    using At = Part<kFormat>;
    static constexpr int kParts = kGroupRows / R::kRows;

    void make_ready(std::int64_t block) {
        for (std::int64_t line = 0; column_ == 0 && line < At::kBytes; line += 64) {
            fetch_second(at_.line(block) + kAhead + line);
        }
        numbers_[block % 2] = spread(at_, block, room_[block % 2]);
    }

    template <int kHigh, int kLow>
    void multiply(std::int64_t block) {
        const InputBlock* inputs = inputs_ + block * kInputColumns;
        const std::uint8_t* numbers = numbers_[block % 2];
        tiles_.zero<kLow>();
        tiles_.load<6>(numbers, 64);
        if (kDigits == 2) {
            tiles_.zero<kHigh>();
            tiles_.load<4>(inputs->high, sizeof(InputBlock));
            tiles_.add_bytes<kHigh, 4, 6>();
        }
        tiles_.load<5>(inputs->low, sizeof(InputBlock));
        tiles_.add_bytes<kLow, 5, 6>();
        if (kDigits == 2) {
            tiles_.store<kHigh>(high_[block % 2], sizeof high_[0][0]);
        }
        tiles_.store<kLow>(low_[block % 2], sizeof low_[0][0]);
    }

    __attribute__((always_inline)) void add(std::int64_t block, typename R::F (&sums)[kInputColumns][kParts]) const {
        const InputBlock* inputs = inputs_ + block * kInputColumns;
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
            const Scaling<kFormat, R> scaling(At(job_.weight, row_ + part * R::kRows), block);
#pragma GCC unroll 16
            for (std::int64_t c = 0; c < kInputColumns; ++c) {
                const std::int32_t* high = kDigits == 2 ? high_[block % 2][c] + part * R::kRows : kZeros;
                const auto dot = R::digits(high, low_[block % 2][c] + part * R::kRows,
                                           has_signed_numbers(kFormat) ? inputs[c].sum : 0);
                sums[c][part] = scaling.add(sums[c][part], dot, inputs[c]);
            }
        }
    }

    static constexpr std::int32_t kZeros[R::kRows] = {};
    Tiles& tiles_;
    const LinearJob& job_;
    const std::int64_t row_, column_;
    const At at_;
    const InputBlock* inputs_;
    const std::uint8_t* numbers_[2];
    alignas(64) std::uint8_t room_[2][kGroupRows * kBlock];
    alignas(64) std::int32_t high_[2][kInputColumns][kGroupRows], low_[2][kInputColumns][kGroupRows];
};

#endif

#if !defined(__AVX512VNNI__)
#include "linear_wide.inl"
#if defined(__AVX2__)
#include "linear_bytes.inl"
#endif
#endif

// Some columns times all rows of a turn: the inputs stay in the first cache, the weights in the second. A function of
// its own, whose registers no caller takes.
template <Format kFormat, int kDigits, int kColumns>
__attribute__((noinline)) void digit_columns(const LinearJob& job, std::int64_t row, std::int64_t end,
                                             std::int64_t column) {
    for (; row < end; row += Rows::kRows) {
        digit_tile<kFormat, kDigits, Rows, kColumns>(job, row, column);
    }
}

template <Format kFormat, int kDigits>
void digit_rows(const LinearJob& job, std::int64_t row, std::int64_t end, [[maybe_unused]] float* scratch) {
    std::int64_t first = 0;
#if defined(OCTAVO_TILES)
    if constexpr (!has_half_scales(kFormat)) {  // which would take twice the tiles: vectors are as fast
        static constexpr TileShapes kShapes = digit_shapes();
        Tiles tiles(kShapes);
        for (; first + kFewestInTiles <= job.columns; first += kInputColumns) {
            for (std::int64_t group = row; group < end; group += kGroupRows) {
                DigitTiles<kFormat, kDigits>(tiles, job, group, first)();
            }
        }
    }
#endif
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    if constexpr (kDigits == 1 && kAddsInWords<kFormat>) {
        if (job.columns - first >= kFewestInBytes) {
            return byte_rows<kFormat>(job, row, end, first, scratch);
        }
    }
#endif
#if !defined(__AVX512VNNI__)
    if (job.columns - first >= kFewestWide<kFormat>) {
        return wide_rows<kFormat>(job, row, end, first, scratch);
    }
#endif
    if constexpr (kDigitsApart) {
        each_columns<8>(job.columns - first, [&](auto count, std::int64_t column) {
            digit_columns<kFormat, kDigits, decltype(count)::kColumns>(job, row, end, first + column);
        });
    }
}

std::int64_t digit_scratch([[maybe_unused]] const LinearJob& job) {
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
    return wide_scratch(job) > byte_scratch(job) ? wide_scratch(job) : byte_scratch(job);
#elif !defined(__AVX512VNNI__)
    return wide_scratch(job);
#else
    return 0;
#endif
}
