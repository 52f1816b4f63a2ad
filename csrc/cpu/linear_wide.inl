// Products of several columns with weights of 4 to 8 bits, without VNNI: inputs as whole numbers of 16 bits, so that
// one instruction multiplies both digits, and sums of 32 bits, which are exact: results have the bits of digit_tile.
//
// A group's numbers are spread to 16 bits once for all columns, some blocks at a time (a panel), and a load of inputs
// serves both halves of the group. Of each four neighbours the first and the third lie together, then the others.

// Fewer columns take less time with digits apart.
template <Format kFormat>
constexpr std::int64_t kFewestWide = kFormat == Format::kQ8 || kFormat == Format::kQ6K ? 3 : 4;
constexpr std::int64_t kWideSlab = 48;   // columns for which a panel is spread once
constexpr std::int64_t kWideBlocks = 8;  // of a panel, which stays in the first cache with its inputs

// A block of a group. Of kQ6K the scales are those of both halves; else the second ones are what Scaling has as
// minimum.
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
    constexpr bool kSigned = kFormat == Format::kQ8 || kFormat == Format::kQ6K;
    for (std::int64_t line = 0; line < Part<kFormat>::kBytes; line += 64) {
        fetch_second(Part<kFormat>(weight, row).line(block) + kAhead + line);
    }
    for (int part = 0; part < kGroupRows; part += Rows8::kRows) {
        const Part<kFormat> at(weight, row + part);
        __m256i bytes[kBlock / 4];
        const auto take = [&](const auto& from, int first, int count) {
            for (int i = 0; i < count; ++i) {
                bytes[first + i] = from.piece[i];
            }
        };
        const std::uint8_t* p = at.numbers(block);
        if (kFormat == Format::kQ8) {
            take(bytes_of(p), 0, 8);
        } else if (kFormat == Format::kQ6K) {
            take(sixes_of(p, at.high(block), 0), 0, 4);
            take(sixes_of(p, at.high(block), 1), 4, 4);
        } else if (kFormat == Format::kQ5K) {
            take(fives_of(p, at.high(block)), 0, 8);
        } else if (kFormat == Format::kMxfp4) {
            take(coded_of(p), 0, 8);
        } else {
            take(nibbles_of(p), 0, 8);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kBlock / 4; ++i) {
            const __m256i even = kSigned ? _mm256_srai_epi16(_mm256_slli_epi16(bytes[i], 8), 8)
                                         : _mm256_and_si256(bytes[i], _mm256_set1_epi16(255));
            const __m256i odd = kSigned ? _mm256_srai_epi16(bytes[i], 8) : _mm256_srli_epi16(bytes[i], 8);
            _mm256_store_si256(reinterpret_cast<__m256i*>(to.numbers[2 * i][part]), even);
            _mm256_store_si256(reinterpret_cast<__m256i*>(to.numbers[2 * i + 1][part]), odd);
        }
        const Scaling<kFormat, Rows8> scaling(at, block);
        store8(to.scales[0] + part, scaling.scale);
        store8(to.scales[1] + part,
               kFormat == Format::kQ6K ? Scaling<kFormat, Rows8>(at, block, 1).scale : scaling.minimum);
    }
}

// The 15 bits of each input as one number, in the order in which weights are spread.
inline void widen_inputs(const InputBlock& input, WideInputs& to) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    const auto sixteen = [](const std::int8_t* p) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    };
    for (int k = 0; k < kBlock; k += 16) {
        static_assert(kDigit == 1 << 7);
        const __m256i high = _mm256_slli_epi16(sixteen(input.high + k), 7);
        const __m256i number = _mm256_add_epi16(high, sixteen(input.low + k));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to.x[k / 2]), _mm256_shuffle_epi8(number, order));
    }
    to.scale = input.scale;
    to.scaled_sum = input.scaled_sum;
}

inline __m256i two(const std::int16_t* x) {
    std::int32_t both;
    std::memcpy(&both, x, 4);
    return _mm256_set1_epi32(both);
}

// The sums of products of kCount pairs, from pair kFirst on, of kColumns columns and 16 rows.
template <int kFirst, int kCount, int kColumns>
__attribute__((always_inline)) inline void wide_dots(const WideBlock& weights, const WideInputs* x,
                                                     __m256i (&dots)[kColumns][2]) {
#pragma GCC unroll 16
    for (int k = kFirst; k < kFirst + kCount; ++k) {
        const __m256i first = _mm256_load_si256(reinterpret_cast<const __m256i*>(weights.numbers[k][0]));
        const __m256i second = _mm256_load_si256(reinterpret_cast<const __m256i*>(weights.numbers[k][8]));
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
            const __m256i input = two(x[c].x[k]);
            const __m256i one = _mm256_madd_epi16(first, input), other = _mm256_madd_epi16(second, input);
            dots[c][0] = k == kFirst ? one : _mm256_add_epi32(dots[c][0], one);
            dots[c][1] = k == kFirst ? other : _mm256_add_epi32(dots[c][1], other);
            __asm__("" : "+x"(dots[c][0]), "+x"(dots[c][1]));  // else compilers make all products before they add any
        }
    }
}

// Adds the products of `count` blocks to the sums of kColumns columns of a group. sums: [kColumns][kGroupRows].
template <Format kFormat, int kColumns>
__attribute__((noinline)) void wide_tile(const WideBlock* weights, const WideInputs* x, std::int64_t count,
                                         float* sums) {
    constexpr bool kHalves = kFormat == Format::kQ6K, kWhole = kHalves || kFormat == Format::kQ8;
    for (; count > 0; --count, ++weights, x += kColumns) {
        __m256i dots[kColumns][2];
        const auto add = [&](int half) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; ++part) {
                const F8 scale = load8(weights->scales[half] + 8 * part);
#pragma GCC unroll 4
                for (int c = 0; c < kColumns; ++c) {
                    float* sum = sums + c * kGroupRows + 8 * part;
                    const F8 dot = mul8(_mm256_cvtepi32_ps(dots[c][part]), set8(x[c].scale));
                    F8 more = fma8(dot, scale, load8(sum));
                    if (!kWhole) {
                        more = fma8(load8(weights->scales[1] + 8 * part), set8(x[c].scaled_sum), more);
                    }
                    store8(sum, more);
                }
            }
        };
        if (kHalves) {
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

struct WideSpace {
    WideBlock* panel;  // [kWideBlocks]
    float* sums;       // [kWideSlab, kGroupRows]
    WideInputs* x;     // [tiles of columns, blocks, columns of the tile]
};

template <Format kFormat>
void wide_slab(const LinearJob& job, std::int64_t row, std::int64_t end, std::int64_t first, std::int64_t last,
               const WideSpace& space) {
    const std::int64_t blocks = job.weight.cols / kBlock;
    each_columns<4>(last - first, [&](auto width, std::int64_t column) {
        constexpr int kColumns = decltype(width)::kColumns;
        WideInputs* x = space.x + column * blocks;
        for (int c = 0; c < kColumns; ++c) {
            const InputBlock* input = job.digits + input_at(first + column + c, blocks);
            for (std::int64_t block = 0; block < blocks; ++block) {
                widen_inputs(input[block * kInputColumns], x[block * kColumns + c]);
            }
        }
    });
    for (; row < end; row += kGroupRows) {
        std::memset(space.sums, 0, kWideSlab * kGroupRows * 4);
        for (std::int64_t block = 0; block < blocks; block += kWideBlocks) {
            const std::int64_t count = blocks - block < kWideBlocks ? blocks - block : kWideBlocks;
            for (std::int64_t i = 0; i < count; ++i) {
                spread_block<kFormat>(job.weight, row, block + i, space.panel[i]);
            }
            each_columns<4>(last - first, [&](auto width, std::int64_t column) {
                constexpr int kColumns = decltype(width)::kColumns;
                const WideInputs* x = space.x + column * blocks + block * kColumns;
                wide_tile<kFormat, kColumns>(space.panel, x, count, space.sums + column * kGroupRows);
            });
        }
        for (std::int64_t column = first; column < last; ++column) {
            const float* sum = space.sums + (column - first) * kGroupRows;
            put_tile<Rows8>(job, column, row, load8(sum));
            if (row + 8 < job.weight.rows) {
                put_tile<Rows8>(job, column, row + 8, load8(sum + 8));
            }
        }
    }
}

template <Format kFormat>
void wide_rows(const LinearJob& job, std::int64_t row, std::int64_t end, float* scratch) {
    WideSpace space;
    space.panel = reinterpret_cast<WideBlock*>((reinterpret_cast<std::uintptr_t>(scratch) + 63) / 64 * 64);
    space.sums = reinterpret_cast<float*>(space.panel + kWideBlocks);
    space.x = reinterpret_cast<WideInputs*>(space.sums + kWideSlab * kGroupRows);
    for (std::int64_t first = 0; first < job.columns; first += kWideSlab) {
        const std::int64_t last = first + kWideSlab < job.columns ? first + kWideSlab : job.columns;
        wide_slab<kFormat>(job, row, end, first, last, space);
    }
}

std::int64_t wide_scratch(const LinearJob& job) {
    const std::int64_t columns = job.columns < kWideSlab ? job.columns : kWideSlab;
    const std::int64_t panel = 64 + kWideBlocks * static_cast<std::int64_t>(sizeof(WideBlock));
    const std::int64_t inputs = columns * (job.weight.cols / kBlock) * static_cast<std::int64_t>(sizeof(WideInputs));
    return (panel + inputs) / 4 + kWideSlab * kGroupRows;
}
