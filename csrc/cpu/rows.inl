// Eight (Rows8) or sixteen (Rows16) rows of a packed matrix side by side in a register: what linear_packed.inl,
// linear_digits.inl and linear_bf16.inl multiply with. In both forms a row has the same operations, so results of
// digits have the same bits wherever fma() fuses, which is everywhere but in plain C++.

// A number of columns (tokens: LinearJob), known to the compiler.
template <int kCount>
struct Columns {
    static constexpr int kColumns = kCount;
};

// Calls run(Columns<n>, the first of n columns) until all `count` have been: kMost at a time, then 4, 2 and 1.
template <int kMost, typename Run>
inline void each_columns(std::int64_t count, const Run& run) {
    std::int64_t column = 0;
    for (; column + kMost <= count; column += kMost) {
        run(Columns<kMost>{}, column);
    }
    if (column + 4 <= count) {
        run(Columns<4>{}, column);
        column += 4;
    }
    if (column + 2 <= count) {
        run(Columns<2>{}, column);
        column += 2;
    }
    if (column < count) {
        run(Columns<1>{}, column);
    }
}

struct Rows8 {
    using F = F8;
    static constexpr int kRows = 8;

    static F zero() { return zero8(); }
    static F set(float x) { return set8(x); }
    static F load(const float* p) { return load8(p); }
    static void store(float* p, F x) { store8(p, x); }
    static F add(F a, F b) { return add8(a, b); }
    static F sub(F a, F b) { return sub8(a, b); }
    static F mul(F a, F b) { return mul8(a, b); }
    static F fma(F a, F b, F c) { return fma8(a, b, c); }
    static F8 eight(F x, int) { return x; }
    // kDigit * (high - offset) + low, as floats. The sum of a block that has a NaN is any number, so it wraps.
    static F digits(const std::int32_t* high, const std::int32_t* low, std::int32_t offset) {
        float wide[8];
        for (int i = 0; i < 8; ++i) {
            const auto digit = static_cast<std::uint32_t>(high[i]) - static_cast<std::uint32_t>(offset);
            wide[i] =
                static_cast<float>(static_cast<std::int32_t>(kDigit * digit + static_cast<std::uint32_t>(low[i])));
        }
        return load8(wide);
    }
    // Of each row a float16, a bfloat16, or a byte.
    static F halves(const std::uint8_t* p) { return load8_f16(reinterpret_cast<const std::uint16_t*>(p)); }
    static F top_halves(const std::uint8_t* p) { return load8_bf16(reinterpret_cast<const std::uint16_t*>(p)); }
    static F bytes(const std::uint8_t* p) { return load8_u8(p); }
    static F signed_bytes(const std::uint8_t* p) { return load8_i8(p); }
    // Of a 32-bit word per row, the bits from `shift` on that `mask` leaves.
    static F pick(const std::uint8_t* p, std::uint32_t shift, int mask) { return pick_of(words_of(p), shift, mask); }
    // Of a 32-bit word per row, the number whose code begins at `shift`.
    template <Format kFormat>
    static F number_of(const std::uint8_t* p, std::uint32_t shift) {
        return number8<kFormat>(words_of(p), shift);
    }

    // Pair: two neighbours of k in each row, in bfloat16. Two: the two inputs they are multiplied with.
    using Pair = Words;
    struct Two {
        F first, second;
    };
    static Pair pair(const std::uint8_t* p) { return words_of(p); }
    static F first(Pair w) { return low_words(w); }
    static F second(Pair w) { return high_words(w); }
    static Two two(const std::uint16_t* p) {
        const Words w = same_words(p);
        return {low_words(w), high_words(w)};
    }
    static F add_pair(F sum, Pair w, Two x) { return fma(second(w), x.second, fma(first(w), x.first, sum)); }

#if defined(__AVX2__)
    // The products of a block's numbers with kColumns blocks of inputs: integers, as floats.
    template <int kDigits, int kColumns>
    static void dots4(const std::uint8_t* p, const InputBlock* inputs, F* dots) {
        const Nibbles n = nibbles_of(p);
#pragma GCC unroll 1  // side by side, columns would want more registers than there are
        for (int c = 0; c < kColumns; ++c) {
            dots[c] = dot_digits<kDigits>(inputs[c], [&](const std::int8_t* x) { return dot_nibbles(n, x); });
        }
    }
    template <int kDigits, int kColumns>
    static void dots5(const std::uint8_t* p, const std::uint8_t* high, const InputBlock* inputs, F* dots) {
        const Fives n = fives_of(p, high);
#pragma GCC unroll 1
        for (int c = 0; c < kColumns; ++c) {
            dots[c] = dot_digits<kDigits>(inputs[c], [&](const std::int8_t* x) { return dot_fives(n, x); });
        }
    }
    // Of codes; the numbers of kMxfp4 are 12 larger.
    template <Format kFormat, int kDigits, int kColumns>
    static void dots_of_codes(const std::uint8_t* p, const InputBlock* inputs, F* dots) {
        const auto n = coded_of<kFormat>(p);
#pragma GCC unroll 1
        for (int c = 0; c < kColumns; ++c) {
            dots[c] = dot_digits<kDigits>(inputs[c], [&](const std::int8_t* x) { return dot_coded(n, x); });
        }
    }
    // Of half a block.
    template <int kDigits, int kHalf, int kColumns>
    static void dots3(const std::uint8_t* p, const std::uint8_t* high, const InputBlock* inputs, F* dots) {
        dots_of_half<kDigits, kHalf, kColumns>(threes_of(p, high, kHalf), inputs, dots);
    }
    template <int kDigits, int kHalf, int kColumns>
    static void dots6(const std::uint8_t* p, const std::uint8_t* high, const InputBlock* inputs, F* dots) {
        dots_of_half<kDigits, kHalf, kColumns>(sixes_of(p, high, kHalf), inputs, dots);
    }
    template <int kDigits, int kColumns>
    static void dots8(const std::uint8_t* p, const InputBlock* inputs, F* dots) {
        const Bytes b = bytes_of(p);
#pragma GCC unroll 1
        for (int c = 0; c < kColumns; ++c) {
            dots[c] = dot_digits<kDigits>(inputs[c], [&](const std::int8_t* x) { return dot_bytes(b, x); });
        }
    }

  private:
    template <int kDigits, int kHalf, int kColumns>
    static void dots_of_half(const Sixes& n, const InputBlock* inputs, F* dots) {
#pragma GCC unroll 1
        for (int c = 0; c < kColumns; ++c) {
            dots[c] =
                dot_digits<kDigits>(inputs[c], [&](const std::int8_t* x) { return dot_sixes(n, x + 16 * kHalf); });
        }
    }
    // Of both digits, or of the low one where the high one is zero. Rounded once, as the integer would be.
    template <int kDigits, typename Dot>
    static F dot_digits(const InputBlock& input, const Dot& dot) {
        return kDigits == 1 ? dot(input.low) : fma8(dot(input.high), set8(kDigit), dot(input.low));
    }
#endif
};

#if defined(__AVX512VNNI__) && defined(__AVX512F__)

// On 512 bits a product takes as long as two on 256, but half the loads of inputs.
struct Rows16 {
    using F = __m512;
    static constexpr int kRows = 16;

    static F zero() { return _mm512_setzero_ps(); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F digits(const std::int32_t* high, const std::int32_t* low, std::int32_t offset) {
        static_assert(kDigit == 1 << 7);
        const __m512i digit = _mm512_sub_epi32(_mm512_loadu_si512(high), _mm512_set1_epi32(offset));
        return _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(digit, 7), _mm512_loadu_si512(low)));
    }
    static F8 eight(F x, int which) { return which == 0 ? _mm512_castps512_ps256(x) : _mm512_extractf32x8_ps(x, 1); }
    static F halves(const std::uint8_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static F top_halves(const std::uint8_t* p) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
    }
    static F bytes(const std::uint8_t* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
    static F signed_bytes(const std::uint8_t* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
    }
    static F pick(const std::uint8_t* p, std::uint32_t shift, int mask) {
        const __m512i shifted = _mm512_srlv_epi32(piece(p), _mm512_set1_epi32(static_cast<int>(shift)));
        return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(mask)));
    }
    template <Format kFormat>
    static F number_of(const std::uint8_t* p, std::uint32_t shift) {
        const __m512 numbers =  // by four bits
            kFormat == Format::kMxfp4 ? _mm512_setr_ps(0, 1, 2, 3, 4, 6, 8, 12, -0.0F, -1, -2, -3, -4, -6, -8, -12)
                                      : signed_bytes(reinterpret_cast<const std::uint8_t*>(shape_of(kFormat).codes));
        return _mm512_permutexvar_ps(_mm512_srlv_epi32(piece(p), _mm512_set1_epi32(static_cast<int>(shift))), numbers);
    }

    // Four bytes in all places.
    static __m512i four(const void* p) {
        std::int32_t bytes;
        std::memcpy(&bytes, p, 4);
        return _mm512_set1_epi32(bytes);
    }

    using Pair = __m512i;
    static Pair pair(const std::uint8_t* p) { return piece(p); }
    static F first(Pair w) { return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16)); }
    static F second(Pair w) {
        return _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
    }
#if defined(__AVX512BF16__)
    using Two = __m512i;
    static Two two(const std::uint16_t* p) { return four(p); }
    static F add_pair(F sum, Pair w, Two x) { return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x); }
#else
    struct Two {
        F first, second;
    };
    static Two two(const std::uint16_t* p) { return {first(four(p)), second(four(p))}; }
    static Two two(const float* p) { return {set(p[0]), set(p[1])}; }
    static F add_pair(F sum, Pair w, Two x) { return fma(second(w), x.second, fma(first(w), x.first, sum)); }
#endif

    template <int kDigits, int kColumns>
    static void dots4(const std::uint8_t* p, const InputBlock* inputs, F* dots) {
        const __m512i mask = _mm512_set1_epi8(15);
        Sums<kDigits, kColumns> sums;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512i both = piece(p + 64 * i);
            sums.add(_mm512_and_si512(both, mask), inputs, 4 * i);
            sums.add(_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), inputs, 16 + 4 * i);
        }
        sums.finish(dots);
    }
    template <Format kFormat, int kDigits, int kColumns>
    static void dots_of_codes(const std::uint8_t* p, const InputBlock* inputs, F* dots) {
        const __m512i mask = _mm512_set1_epi8(15), table = _mm512_broadcast_i32x4(unsigned_codes<kFormat>());
        Sums<kDigits, kColumns> sums;
        if (has_signed_numbers(kFormat)) {
            sums.begin([&](int c) { return 0U - 128U * static_cast<std::uint32_t>(inputs[c].sum); });
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512i both = piece(p + 64 * i);
            const __m512i next = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
            sums.add(_mm512_shuffle_epi8(table, _mm512_and_si512(both, mask)), inputs, 4 * i);
            sums.add(_mm512_shuffle_epi8(table, next), inputs, 16 + 4 * i);
        }
        sums.finish(dots);
    }
    template <int kDigits, int kColumns>
    static void dots5(const std::uint8_t* p, const std::uint8_t* high, const InputBlock* inputs, F* dots) {
        const __m512i mask = _mm512_set1_epi8(15), bits = piece(high);
        Sums<kDigits, kColumns> sums;
#pragma GCC unroll 4
        for (unsigned i = 0; i < 4; ++i) {
            const __m512i both = piece(p + 64 * i);
            const __m512i low = _mm512_and_si512(both, mask);
            const __m512i next = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
            const __m512i low_bits = _mm512_and_si512(_mm512_slli_epi16(bits, 4 - i), _mm512_set1_epi8(16));
            const __m512i next_bits = _mm512_and_si512(_mm512_srli_epi16(bits, i), _mm512_set1_epi8(16));
            sums.add(_mm512_or_si512(low, low_bits), inputs, 4 * static_cast<int>(i));
            sums.add(_mm512_or_si512(next, next_bits), inputs, 16 + 4 * static_cast<int>(i));
        }
        sums.finish(dots);
    }
    template <int kDigits, int kHalf, int kColumns>
    static void dots3(const std::uint8_t* p, const std::uint8_t* high, const InputBlock* inputs, F* dots) {
        const __m512i twos = piece(p + 64 * kHalf), bits = piece(high);
        Sums<kDigits, kColumns> sums;
        begin_half<kHalf>(sums, 4, inputs);
#pragma GCC unroll 4
        for (unsigned i = 0; i < 4; ++i) {
            constexpr unsigned kFirst = 4 * kHalf;
            const __m512i two = _mm512_and_si512(_mm512_srli_epi16(twos, 2 * i), _mm512_set1_epi8(3));
            const __m512i moved =
                kFirst + i < 2 ? _mm512_slli_epi16(bits, 2 - kFirst - i) : _mm512_srli_epi16(bits, kFirst + i - 2);
            const __m512i third = _mm512_and_si512(moved, _mm512_set1_epi8(4));
            sums.add(_mm512_or_si512(two, third), inputs, 16 * kHalf + 4 * static_cast<int>(i));
        }
        sums.finish(dots);
    }
    template <int kDigits, int kHalf, int kColumns>
    static void dots6(const std::uint8_t* p, const std::uint8_t* high, const InputBlock* inputs, F* dots) {
        const __m512i mask = _mm512_set1_epi8(15), bits = piece(high + 64 * kHalf);
        Sums<kDigits, kColumns> sums;
        begin_half<kHalf>(sums, 32, inputs);
#pragma GCC unroll 4
        for (unsigned i = 0; i < 4; ++i) {
            const __m512i both = piece(p + 64 * i);
            const __m512i nibbles = _mm512_and_si512(kHalf == 0 ? both : _mm512_srli_epi16(both, 4), mask);
            const __m512i shifted = i < 2 ? _mm512_slli_epi16(bits, 4 - 2 * i) : _mm512_srli_epi16(bits, 2 * i - 4);
            const __m512i two = _mm512_and_si512(shifted, _mm512_set1_epi8(48));
            sums.add(_mm512_or_si512(nibbles, two), inputs, 16 * kHalf + 4 * static_cast<int>(i));
        }
        sums.finish(dots);
    }
    template <int kDigits, int kColumns>
    static void dots8(const std::uint8_t* p, const InputBlock* inputs, F* dots) {
        Sums<kDigits, kColumns> sums;
        sums.begin([&](int c) { return 0U - 128U * static_cast<std::uint32_t>(inputs[c].sum); });
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            sums.add(piece(p + 64 * i), inputs, 4 * i);
        }
        sums.finish(dots);
    }

  private:
    static __m512i piece(const std::uint8_t* p) { return _mm512_loadu_si512(p); }

    // Makes up for numbers of half a block that are `offset` larger than they should be.
    template <int kHalf, typename SumsOf>
    static void begin_half(SumsOf& sums, std::uint32_t offset, const InputBlock* inputs) {
        sums.begin([&](int c) {
            const auto first = static_cast<std::uint32_t>(inputs[c].first_sum);
            return 0U - offset * (kHalf == 0 ? first : static_cast<std::uint32_t>(inputs[c].sum) - first);
        });
    }

    // Every column takes a step before any takes the next: sums that wait for themselves would fill the scheduler.
    template <int kDigits, int kColumns>
    struct Sums {
        __m512i high[kColumns], low[kColumns];

        Sums() {
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                high[c] = low[c] = _mm512_setzero_si512();
            }
        }
        // The offset of unsigned bytes. The sum of a block that has a NaN is any number, so it wraps.
        template <typename Offset>
        void begin(const Offset& offset) {
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                low[c] = _mm512_set1_epi32(static_cast<std::int32_t>(offset(c)));
            }
        }
        void add(__m512i weights, const InputBlock* inputs, int first) {
#pragma GCC unroll 16
            for (int c = 0; kDigits == 2 && c < kColumns; ++c) {
                high[c] = _mm512_dpbusd_epi32(high[c], weights, four(inputs[c].high + first));
            }
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                low[c] = _mm512_dpbusd_epi32(low[c], weights, four(inputs[c].low + first));
            }
        }
        void finish(F* dots) const {
            static_assert(kDigit == 1 << 7);
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                const __m512i all = kDigits == 1 ? low[c] : _mm512_add_epi32(_mm512_slli_epi32(high[c], 7), low[c]);
                dots[c] = _mm512_cvtepi32_ps(all);
            }
        }
    };
};

using Rows = Rows16;

#else

using Rows = Rows8;

#endif
