// Products in bfloat16, summed in float32, for pages of bfloat16 and of 8 bits, which become bfloat16 without being
// rounded: with vdpbf16ps, or with tiles. Queries and weights are rounded. Packed keys and values lie as both take
// them: pairs of dimensions, or of keys, beside each other.

#if defined(__AVX512BF16__) || defined(OCTAVO_TILES)

// How many numbers a word of a page holds that is moved before its numbers become bfloat16.
#if defined(__AVX512BF16__)
template <DType kType>
constexpr std::int64_t kInWord = kType == DType::kI8 ? 4 : 2;
#else
template <DType>
constexpr std::int64_t kInWord = 2;
#endif

struct Bf16Pairs {
    using Number = std::uint16_t;
    static constexpr std::int64_t kPair = 2, kRowStep = 16, kDimStep = 32, kKeyStep = 32, kPieceStep = 32;

    static void put_query(const float* from, std::int64_t dim, Number* to) {
        for (std::int64_t d = 0; d < dim; d += 8) {
            store8_bf16(to + d, load8(from + d));
        }
    }
    static float value(Number x) { return bf16_to_float(x); }

    static void pack_keys(const KvPages& pages, const Slots& slots, Range range, Scratch<Bf16Pairs>& s, Ahead& asked) {
        with_pairs(pages.dtype, [&](auto type) {
            pack_keys_of<Bf16Pairs, decltype(type)::value>(pages.head_dim, slots, range, s, asked);
        });
    }
    static bool pack_values(const KvPages& pages, const Slots& slots, Range range, Scratch<Bf16Pairs>& s,
                            Ahead& asked) {
        bool finite = false;
        with_pairs(pages.dtype, [&](auto type) {
            finite = pack_values_of<decltype(type)::value>(pages.head_dim, slots, range, s, asked);
        });
        return finite;
    }

    // How many dimensions a lane holds while keys are turned, and how many keys' values are taken together.
    template <DType kType>
    static constexpr std::int64_t kInLane = kInWord<kType>;
    template <DType kType>
    static constexpr std::int64_t kTogether = kInWord<kType>;

#if defined(__AVX512BF16__)
    template <DType kType>
    static Lanes::F load_words(const char* p, std::int64_t count) {
        if constexpr (kType == DType::kI8) {
            return Lanes::load_some(reinterpret_cast<const float*>(p), count / 4);
        }
        return load_pairs<kType>(p, count);
    }
    template <DType kType, typename Use>
    __attribute__((always_inline)) static void take_apart(Lanes::F words, std::int64_t d, const Use& use) {
        if constexpr (kType == DType::kI8) {
            use(beside(Lanes::part<kType, 0>(words), Lanes::part<kType, 1>(words)), d);
            use(beside(Lanes::part<kType, 2>(words), Lanes::part<kType, 3>(words)), d + 2);
        } else {
            use(words, d);
        }
    }
    template <DType kType, int kWide, typename Use>
    __attribute__((always_inline)) static void each_value(const char* p, std::int64_t stride, std::int64_t key,
                                                          const Use& use) {
        constexpr std::int64_t kSteps = kInWord<kType> / 2;
        Lanes::F x[kSteps][kWide];
#pragma GCC unroll 2
        for (int g = 0; g < kWide; g += 2, p += kNumbers * kSize<kType>) {
            if constexpr (kType == DType::kI8) {
                Lanes::F words[2];
                load_fours(p, stride, words);
#pragma GCC unroll 2
                for (int i = 0; i < 2; ++i) {
                    x[0][g + i] = beside(Lanes::part<kType, 0>(words[i]), Lanes::part<kType, 1>(words[i]));
                    x[1][g + i] = beside(Lanes::part<kType, 2>(words[i]), Lanes::part<kType, 3>(words[i]));
                }
            } else {
                interleave(load_pairs<kType>(p, kNumbers), load_pairs<kType>(p + stride, kNumbers), x[0][g],
                           x[0][g + 1]);
            }
        }
#pragma GCC unroll 2
        for (std::int64_t step = 0; step < kSteps; ++step) {
            use(key + 2 * step, [&](int g) __attribute__((always_inline)) { return x[step][g]; });
        }
    }

    static __m512i spread(const Number* pair) {
        std::int32_t both;
        std::memcpy(&both, pair, 4);
        return _mm512_set1_epi32(both);
    }
    static Lanes::F add(Lanes::F sum, Lanes::F x, __m512i y) {
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(x), (__m512bh)y);
    }
    static constexpr int kWeights = 32;  // put down together
    static void put_weights(const Lanes::F (&x)[2], Number* to) {
        _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
    }
#else
    template <DType kType>
    static Lanes::F load_words(const char* p, std::int64_t count) {
        return load_pairs<kType>(p, count);
    }
    template <DType, typename Use>
    static void take_apart(Lanes::F words, std::int64_t d, const Use& use) {
        use(words, d);
    }

    static constexpr int kWeights = Lanes::kCount;
    static void put_weights(const Lanes::F (&x)[1], Number* to) { store8_bf16(to, x[0]); }
#endif

  private:
    static constexpr std::int64_t kNumbers = 2 * Lanes::kCount;  // in a register

    template <typename Do>
    static void with_pairs(DType type, const Do& run) {
        switch (type) {
            case DType::kBF16:
                return run(std::integral_constant<DType, DType::kBF16>());
            case DType::kE4M3:
                return run(std::integral_constant<DType, DType::kE4M3>());
            case DType::kE5M2:
                return run(std::integral_constant<DType, DType::kE5M2>());
            default:
                return run(std::integral_constant<DType, DType::kI8>());
        }
    }

#if defined(__AVX512BF16__)
    // kNumbers as pairs of bfloat16; those past `count` are zeros.
    template <DType kType>
    static Lanes::F load_pairs(const char* p, std::int64_t count) {
        if constexpr (kType == DType::kBF16) {
            return Lanes::load_some(reinterpret_cast<const float*>(p), count / 2);
        }
        const auto some = static_cast<__mmask32>(count > 0 ? (1U << count % 32) - 1 : 0);
        const __m256i bytes =
            count >= 32 ? _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)) : _mm256_maskz_loadu_epi8(some, p);
        if constexpr (kType == DType::kI8) {
            return pairs(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes))),
                         _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1))));
        }
        __m512i half = _mm512_slli_epi16(_mm512_cvtepu8_epi16(bytes), 8);  // e5m2 is the upper half of float16
        if constexpr (kType == DType::kE4M3) {                             // as load8_e4m3
            const __m512i wide = _mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7), top = _mm512_set1_epi16(0x3f80);
            half = _mm512_and_si512(wide, _mm512_set1_epi16(static_cast<short>(0xbf80)));
            const __mmask32 nan = _mm512_cmpeq_epi16_mask(_mm512_and_si512(wide, top), top);
            half = _mm512_mask_blend_epi16(nan, half, _mm512_set1_epi16(0x7e00));
        }
        return pairs(_mm512_cvtph_ps(_mm512_castsi512_si256(half)),
                     _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)));
    }
    static Lanes::F pairs(Lanes::F low, Lanes::F high) {
        return _mm512_castsi512_ps((__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
    // Zeros where both of a pair are finite.
    static Lanes::F times_zero(Lanes::F x) { return add(Lanes::zero(), x, _mm512_setzero_si512()); }
    // Two floats that bfloat16 has, as a pair.
    static Lanes::F beside(Lanes::F first, Lanes::F second) {
        const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(first), 16);
        return Lanes::either(_mm512_castsi512_ps(low), Lanes::upper(second));
    }
    // Each number of x beside that of y.
    static void interleave(Lanes::F x, Lanes::F y, Lanes::F& low_dims, Lanes::F& high_dims) {
        const __m512i a = _mm512_castps_si512(x), b = _mm512_castps_si512(y);
        const __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
        const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
        const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
        low_dims = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low, first, high));
        high_dims = _mm512_castsi512_ps(_mm512_permutex2var_epi64(low, second, high));
    }
    static void put_pairs(Lanes::F x, Lanes::F y, Number* to) {
        Lanes::F low, high;
        interleave(x, y, low, high);
        Lanes::store(reinterpret_cast<float*>(to), low);
        Lanes::store(reinterpret_cast<float*>(to + kNumbers), high);
    }
    // 32 bytes of each of four keys: those of a dimension become a word.
    static void load_fours(const char* p, std::int64_t stride, Lanes::F (&words)[2]) {
        const __m512i quarters = _mm512_setr_epi32(0, 4, 0, 4, 1, 5, 1, 5, 2, 6, 2, 6, 3, 7, 3, 7);
        __m512i x[4];
#pragma GCC unroll 4
        for (int key = 0; key < 4; ++key, p += stride) {
            const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
            x[key] = _mm512_permutexvar_epi32(quarters, _mm512_castsi256_si512(bytes));
        }
        const __m512i one = _mm512_unpacklo_epi8(x[0], x[1]), two = _mm512_unpacklo_epi8(x[2], x[3]);
        words[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(one, two));
        words[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(one, two));
    }
#else
    struct Numbers {
        Number x[kNumbers];
    };
    template <DType kType>
    static Lanes::F load_pairs(const char* p, std::int64_t count) {
        Numbers numbers{};
        for (std::int64_t i = 0; i < kNumbers && i < count; i += 8) {
            store8_bf16(numbers.x + i, load8_as<kType>(p + i * kSize<kType>));
        }
        Lanes::F pairs;
        std::memcpy(&pairs, &numbers, sizeof pairs);
        return pairs;
    }
    static Numbers numbers_of(Lanes::F pairs) {
        Numbers numbers;
        std::memcpy(&numbers, &pairs, sizeof numbers);
        return numbers;
    }
    static Lanes::F times_zero(Lanes::F x) {
        float zero = 0;
        for (const Number number : numbers_of(x).x) {
            zero += 0.0F * bf16_to_float(number);
        }
        return Lanes::set(zero);
    }
    static void put_pairs(Lanes::F x, Lanes::F y, Number* to) {
        const Numbers first = numbers_of(x), second = numbers_of(y);
        for (std::int64_t i = 0; i < kNumbers; ++i) {
            to[2 * i] = first.x[i];
            to[2 * i + 1] = second.x[i];
        }
    }
#endif

    template <DType kType>
    static bool pack_values_of(std::int64_t dim, const Slots& slots, Range range, Scratch<Bf16Pairs>& s, Ahead& asked) {
        Lanes::F zeros = Lanes::zero();
        Ahead ahead = asked;
        for (std::int64_t key = range.from; key < range.end; key += Lanes::kCount) {
            const SlotLanes lanes(slots, key);
            for (std::int64_t i = 0; i < Lanes::kCount; i += 2) {
                Number* to = s.values + (key + i) * s.dim;
                ahead.ask(lines_for(2 * dim * kSize<kType>));
                for (std::int64_t d = 0; d < s.dim; d += kNumbers) {
                    const Lanes::F x = load_pairs<kType>(lanes.at(i) + d * kSize<kType>, dim - d);
                    const Lanes::F y = load_pairs<kType>(lanes.at(i + 1) + d * kSize<kType>, dim - d);
                    zeros = Lanes::either(zeros, Lanes::either(times_zero(x), times_zero(y)));
                    put_pairs(x, y, to + 2 * d);
                }
            }
        }
        asked = ahead;
        return Lanes::sum(zeros) == 0.0F;
    }

#if defined(OCTAVO_TILES)
  public:
    static constexpr std::int64_t kBlockRows = 32;
    static constexpr bool kInPlace = false;
    static std::int64_t most_turned(const KvPages&) { return 0; }
    static std::int64_t most_in_place(const KvPages&) { return 0; }

    // Tiles 0 ... 3 are sums of 32 columns, 4 and 5 of the left, 6 and 7 of the right. Rows up to a multiple of 16 are
    // computed.
    void multiply(const Factors<Number>& f, Ahead& ahead) {
        f.rows > 16 ? multiply_tiles<true>(f, ahead) : multiply_tiles<false>(f, ahead);
    }

  private:
    template <bool kHigh>
    void multiply_tiles(const Factors<Number>& f, Ahead& ahead) {
        const std::int64_t out_bytes = 4 * f.out_stride, left_bytes = 2 * f.left_stride;
        for (std::int64_t column = 0; column < f.columns; column += 32) {
            float *out = f.out + column, *lower = out + 16 * f.out_stride;
            if (f.add) {
                tiles_.load<0>(out, out_bytes);
                tiles_.load<1>(out + 16, out_bytes);
            } else {
                tiles_.zero<0>();
                tiles_.zero<1>();
            }
            if (kHigh && f.add) {
                tiles_.load<2>(lower, out_bytes);
                tiles_.load<3>(lower + 16, out_bytes);
            } else if (kHigh) {
                tiles_.zero<2>();
                tiles_.zero<3>();
            }
            const Number *left = f.left, *right = f.right + 2 * column;
            for (std::int64_t k = 0; k < f.inner; k += 32, left += 32, right += 16 * f.right_stride) {
                ahead.ask(16);
                tiles_.load<4>(left, left_bytes);
                tiles_.load<6>(right, 2 * f.right_stride);
                tiles_.load<7>(right + 32, 2 * f.right_stride);
                tiles_.add_bf16<0, 4, 6>();
                tiles_.add_bf16<1, 4, 7>();
                if (kHigh) {
                    tiles_.load<5>(left + 16 * f.left_stride, left_bytes);
                    tiles_.add_bf16<2, 5, 6>();
                    tiles_.add_bf16<3, 5, 7>();
                }
            }
            tiles_.store<0>(out, out_bytes);
            tiles_.store<1>(out + 16, out_bytes);
            if (kHigh) {
                tiles_.store<2>(lower, out_bytes);
                tiles_.store<3>(lower + 16, out_bytes);
            }
        }
    }

    static constexpr TileShapes kShapes = bf16_shapes();
    Tiles tiles_{kShapes};
#else
  public:
    static constexpr std::int64_t kBlockRows = kRegisterRows;
    static constexpr bool kInPlace = true;
    // How many rows take keys, or values, from where they lie. It is what was measured to be faster.
    static std::int64_t most_turned(const KvPages& pages) { return pages.dtype == DType::kBF16 ? 3 : kBlockRows; }
    static std::int64_t most_in_place(const KvPages& pages) { return most_turned(pages); }

    void multiply(const Factors<Number>& f, Ahead& ahead) { multiply_in_registers<Bf16Pairs>(f, Packed{}, ahead); }
    static void multiply_keys(const KvPages& pages, const Slots& slots, Range range, const Factors<Number>& f,
                              Ahead& ahead) {
        with_pairs(pages.dtype,
                   [&](auto type) { octavo::multiply_keys<Bf16Pairs, decltype(type)::value>(f, slots, range, ahead); });
    }
    static void multiply_values(const KvPages& pages, const Group* groups, const Factors<Number>& f, Ahead& ahead) {
        with_pairs(pages.dtype, [&](auto type) {
            multiply_in_registers<Bf16Pairs>(f, InPlace<decltype(type)::value>{groups}, ahead);
        });
    }
#endif
};

#endif
