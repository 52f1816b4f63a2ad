// Products of columns with weights of 3 to 6 bits and inputs of one digit, on AVX2: one instruction multiplies bytes
// and adds neighbours in 16 bits, in which some of these sums have room. All sums are whole numbers, so results have
// the bits of digit_tile.
//
// A group's numbers are spread to unsigned bytes once for all columns, some blocks at a time (a panel), and a load of
// inputs serves both halves of the group.

template <Format kFormat>
constexpr bool kAddsInWords = has_half_scales(kFormat) || !has_signed_numbers(kFormat);
// How many sums of two products, each with the largest number, fit 16 bits. Those of half a block do without their
// offset, which is at most 32: so sums that wrap come out right when it is taken from them.
template <Format kFormat>
constexpr int kSumsInWords = high_bits(kFormat) != 0 || has_codes(kFormat) ? 4 : 8;
constexpr std::int64_t kFewestInBytes = 3;  // columns: fewer take less time as they are
constexpr std::int64_t kByteSlab = 48;      // columns for which a panel is spread once
constexpr std::int64_t kByteBlocks = 8;     // of a panel, which stays in the first cache with its inputs
constexpr int kByteColumns = 4;             // whose sums registers have room for
constexpr int kFours = kBlock / 4;

// A block of a group. The scales are those of both halves where these have their own; else the second ones are what
// Scaling has as minimum.
struct alignas(64) ByteBlock {
    std::uint8_t numbers[kFours][kGroupRows][4];
    float scales[2][kGroupRows];
};

// What makes up for the offset of a column's numbers in the sums of half a block: a word for the first two of each four
// neighbours, and one for the others.
struct Offsets {
    std::int32_t words[2];
};

template <Format kFormat>
inline Offsets offsets_of(const InputBlock& x) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x.low));
    __m256i sums = _mm256_maddubs_epi16(_mm256_set1_epi8(static_cast<char>(offset_of(kFormat))), low);
    sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0x4e));
    sums = _mm256_add_epi16(sums, _mm256_shuffle_epi32(sums, 0xb1));
    sums = _mm256_sub_epi16(_mm256_setzero_si256(), sums);
    return {{_mm256_extract_epi32(sums, 0), _mm256_extract_epi32(sums, 4)}};
}

template <Format kFormat>
inline void spread_bytes(const Weight& weight, std::int64_t row, std::int64_t block, ByteBlock& to) {
    for (std::int64_t line = 0; line < Part<kFormat>::kBytes; line += 64) {
        fetch_second(Part<kFormat>(weight, row).line(block) + kAhead + line);
    }
    for (int part = 0; part < kGroupRows; part += Rows8::kRows) {
        const Part<kFormat> at(weight, row + part);
        unsigned_bytes<kFormat>(at.numbers(block), at.high(block), &to.numbers[0][part][0], sizeof to.numbers[0]);
        const Scaling<kFormat, Rows8> scaling(at, block);
        store8(to.scales[0] + part, scaling.scale);
        store8(to.scales[1] + part,
               has_half_scales(kFormat) ? Scaling<kFormat, Rows8>(at, block, 1).scale : scaling.minimum);
    }
}

// The products of kCount times four neighbours, from `first` on, of kColumns columns and 16 rows.
template <Format kFormat, int kFirst, int kCount, int kColumns>
__attribute__((always_inline)) inline void byte_dots(const ByteBlock& weights, const InputBlock* x,
                                                     [[maybe_unused]] const Offsets* offsets,
                                                     __m256i (&dots)[kColumns][2]) {
    constexpr int kSums = kSumsInWords<kFormat>;
#pragma GCC unroll 2
    for (int from = kFirst; from < kFirst + kCount; from += kSums) {
        __m256i pairs[kColumns][2];
#pragma GCC unroll 8
        for (int k = from; k < from + kSums; ++k) {
            const auto* numbers = reinterpret_cast<const __m256i*>(weights.numbers[k]);
            const __m256i one = _mm256_load_si256(numbers), other = _mm256_load_si256(numbers + 1);
#pragma GCC unroll 4
            for (int c = 0; c < kColumns; ++c) {
                const __m256i input = four(x[c].low + 4 * k);
                const __m256i a = _mm256_maddubs_epi16(one, input), b = _mm256_maddubs_epi16(other, input);
                if (has_half_scales(kFormat) && k == from) {
                    pairs[c][0] = pairs[c][1] = _mm256_set1_epi32(offsets[c].words[k / kSums]);
                }
                const bool first = !has_half_scales(kFormat) && k == from;
                pairs[c][0] = first ? a : _mm256_add_epi16(pairs[c][0], a);
                pairs[c][1] = first ? b : _mm256_add_epi16(pairs[c][1], b);
                as_is(pairs[c][0]);  // else compilers make all products before they add any
                as_is(pairs[c][1]);
            }
        }
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; ++part) {
                const __m256i sum = _mm256_madd_epi16(pairs[c][part], _mm256_set1_epi16(1));
                dots[c][part] = from == kFirst ? sum : _mm256_add_epi32(dots[c][part], sum);
            }
        }
    }
}

// Adds the products of `count` blocks to the sums of kColumns columns of a group. sums: [kColumns][kGroupRows];
// offsets: those of a block lie beside each other, those of the next one `stride` later.
template <Format kFormat, int kColumns>
__attribute__((noinline)) void byte_tile(const ByteBlock* weights, const InputBlock* x, const Offsets* offsets,
                                         std::int64_t stride, std::int64_t count, float* sums) {
    for (; count > 0; --count, ++weights, x += kInputColumns, offsets += stride) {
        __m256i dots[kColumns][2];
        const auto add = [&](int half) __attribute__((always_inline)) {
#pragma GCC unroll 2
            for (int part = 0; part < 2; ++part) {
                const F8 scale = load8(weights->scales[half] + 8 * part);
#pragma GCC unroll 4
                for (int c = 0; c < kColumns; ++c) {
                    float* sum = sums + c * kGroupRows + 8 * part;
                    const F8 dot = mul8(_mm256_cvtepi32_ps(dots[c][part]), set8(x[c].scale));
                    F8 all = fma8(dot, scale, load8(sum));
                    if (!has_signed_numbers(kFormat)) {
                        all = fma8(load8(weights->scales[1] + 8 * part), set8(x[c].scaled_sum), all);
                    }
                    store8(sum, all);
                }
            }
        };
        if constexpr (has_half_scales(kFormat)) {
            byte_dots<kFormat, 0, kFours / 2, kColumns>(*weights, x, offsets, dots);
            add(0);
            byte_dots<kFormat, kFours / 2, kFours / 2, kColumns>(*weights, x, offsets, dots);
            add(1);
        } else {
            byte_dots<kFormat, 0, kFours, kColumns>(*weights, x, offsets, dots);
            add(0);
        }
    }
}

// The columns from `first` on.
template <Format kFormat>
void byte_rows(const LinearJob& job, std::int64_t first_row, std::int64_t end, std::int64_t first, float* scratch) {
    const std::int64_t blocks = job.weight.cols / kBlock;
    auto* panel = reinterpret_cast<ByteBlock*>((reinterpret_cast<std::uintptr_t>(scratch) + 63) / 64 * 64);
    auto* sums = reinterpret_cast<float*>(panel + kByteBlocks);
    auto* offsets = reinterpret_cast<Offsets*>(sums + kByteSlab * kGroupRows);
    std::memset(sums, 0, static_cast<std::size_t>(kByteSlab * kGroupRows) * sizeof(float));
    for (; first < job.columns; first += kByteSlab) {
        const std::int64_t columns = job.columns - first < kByteSlab ? job.columns - first : kByteSlab;
        for (std::int64_t block = 0; has_half_scales(kFormat) && block < blocks; ++block) {
            for (std::int64_t column = 0; column < columns; ++column) {
                const std::int64_t at = input_at(first + column, blocks) + block * kInputColumns;
                offsets[block * columns + column] = offsets_of<kFormat>(job.digits[at]);
            }
        }
        const std::int64_t tiles = (columns + kByteColumns - 1) / kByteColumns;
        for (std::int64_t row = first_row; row < end; row += kGroupRows) {
            LowRankTile<kByteSlab> adapters(job, first, columns, row, kGroupRows,
                                            (blocks + kByteBlocks - 1) / kByteBlocks * tiles);
            for (std::int64_t block = 0; block < blocks; block += kByteBlocks) {
                const std::int64_t count = blocks - block < kByteBlocks ? blocks - block : kByteBlocks;
                for (std::int64_t i = 0; i < count; ++i) {
                    spread_bytes<kFormat>(job.weight, row, block + i, panel[i]);
                }
                each_columns<kByteColumns>(columns, [&](auto width, std::int64_t column) {
                    constexpr int kColumns = decltype(width)::kColumns;
                    adapters.fetch_some();
                    const InputBlock* x = job.digits + input_at(first + column, blocks) + block * kInputColumns;
                    byte_tile<kFormat, kColumns>(panel, x, offsets + block * columns + column, columns, count,
                                                 sums + column * kGroupRows);
                    for (int c = 0; c < kColumns && block + count == blocks; ++c) {
                        put_sums(job, first + column + c, row, sums + (column + c) * kGroupRows);
                    }
                });
            }
            adapters.add(job, first, columns, row, kGroupRows);
        }
    }
}

std::int64_t byte_scratch(const LinearJob& job) {
    const std::int64_t columns = job.columns < kByteSlab ? job.columns : kByteSlab;
    const std::int64_t panel = 64 + kByteBlocks * static_cast<std::int64_t>(sizeof(ByteBlock));
    const std::int64_t offsets = columns * (job.weight.cols / kBlock) * static_cast<std::int64_t>(sizeof(Offsets));
    return (panel + offsets) / 4 + kByteSlab * kGroupRows;
}
