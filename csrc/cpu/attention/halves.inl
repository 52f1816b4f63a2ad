// Products in bfloat16, summed in float32, for pages of bfloat16: with vdpbf16ps, or with tiles. Queries and weights
// are rounded. Packed keys and values lie as both take them: pairs of dimensions, or of keys, beside each other.

#if defined(__AVX512BF16__) || defined(OCTAVO_TILES)

struct Halves {
    using Number = std::uint16_t;
    static constexpr std::int64_t kPair = 2, kRowStep = 16, kDimStep = 32, kKeyStep = 32;

    static bool in_place(const KvPages&, std::int64_t) { return false; }

    static void put_query(const float* from, std::int64_t dim, Number* to) {
        for (std::int64_t d = 0; d < dim; d += 8) {
            store8_bf16(to + d, load8(from + d));
        }
    }
    static float value(Number x) { return bf16_to_float(x); }

    // Pairs of dimensions are moved like floats.
    static void pack_keys(const KvPages& pages, const Slots& slots, Range range, Scratch<Halves>& s, Ahead& asked) {
        auto* to = reinterpret_cast<float*>(s.keys);
        const std::int64_t pairs = pages.head_dim / 2;
        Ahead ahead = asked;
        for (std::int64_t key = range.from; key < range.end; key += Lanes::kCount) {
            const SlotLanes lanes(slots, key);
            for (std::int64_t d = 0; d < s.dim / 2; d += Lanes::kCount) {
                Lanes::F x[Lanes::kCount];
#pragma GCC unroll 16
                for (int i = 0; i < Lanes::kCount; ++i) {
                    x[i] = Lanes::load_some(reinterpret_cast<const float*>(lanes.at[i]) + d, pairs - d);
                }
                ahead.ask(lines_for(4 * Lanes::kCount * Lanes::kCount));
                Lanes::transpose(x);
#pragma GCC unroll 16
                for (int i = 0; i < Lanes::kCount; ++i) {
                    Lanes::store(to + (d + i) * kKeyTile + key, x[i]);
                }
            }
        }
        asked = ahead;
    }

#if defined(__AVX512BF16__)
    static __m512i spread(const Number* pair) {
        std::int32_t both;
        std::memcpy(&both, pair, 4);
        return _mm512_set1_epi32(both);
    }
    static Lanes::F add(Lanes::F sum, Lanes::F x, __m512i y) {
        return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(x), (__m512bh)y);
    }
    static void put_weights(Lanes::F weights, Number* to) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(weights));
    }
    static bool pack_values(const KvPages& pages, const Slots& slots, Range range, Scratch<Halves>& s, Ahead& asked) {
        Lanes::F zeros = Lanes::zero();
        const __m512i low = pairs_from(0), high = pairs_from(16), none = _mm512_setzero_si512();
        Ahead ahead = asked;
        for (std::int64_t key = range.from; key < range.end; key += Lanes::kCount) {
            const SlotLanes lanes(slots, key);
            for (std::int64_t i = 0; i < Lanes::kCount; i += 2) {
                Number* to = s.values + (key + i) * s.dim;
                for (std::int64_t d = 0; d < s.dim; d += 32) {
                    const std::int64_t rest = (pages.head_dim - d) / 2;
                    const Lanes::F x = Lanes::load_some(reinterpret_cast<const float*>(lanes.at[i] + 2 * d), rest);
                    const Lanes::F y = Lanes::load_some(reinterpret_cast<const float*>(lanes.at[i + 1] + 2 * d), rest);
                    ahead.ask(lines_for(128));
                    zeros = Lanes::either(zeros, add(add(Lanes::zero(), x, none), y, none));
                    const __m512i a = _mm512_castps_si512(x), b = _mm512_castps_si512(y);
                    _mm512_storeu_si512(to + 2 * d, _mm512_permutex2var_epi16(a, low, b));
                    _mm512_storeu_si512(to + 2 * d + 32, _mm512_permutex2var_epi16(a, high, b));
                }
            }
        }
        asked = ahead;
        return Lanes::sum(zeros) == 0.0F;
    }

  private:
    // The places of 16 pairs of one row's number and the other's.
    static __m512i pairs_from(std::uint16_t first) {
        alignas(64) std::uint16_t places[32];
        for (std::uint16_t i = 0; i < 16; ++i) {
            places[2 * i] = static_cast<std::uint16_t>(first + i);
            places[2 * i + 1] = static_cast<std::uint16_t>(first + i + 32);
        }
        return _mm512_load_si512(places);
    }
#else
    static void put_weights(Lanes::F weights, Number* to) { store8_bf16(to, weights); }
    static bool pack_values(const KvPages& pages, const Slots& slots, Range range, Scratch<Halves>& s, Ahead&) {
        bool finite = true;
        for (std::int64_t key = range.from; key < range.end; ++key) {
            Number* to = s.values + key / 2 * 2 * s.dim + key % 2;
            for (std::int64_t d = 0; d < s.dim; ++d) {
                Number x = 0;
                if (d < pages.head_dim) {
                    std::memcpy(&x, slots.at(key) + 2 * d, 2);
                }
                finite = finite && (x & 0x7f80) != 0x7f80;
                to[2 * d] = x;
            }
        }
        return finite;
    }
#endif

#if defined(OCTAVO_TILES)
  public:
    static constexpr std::int64_t kBlockRows = 32;

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
                tiles_.add_halves<0, 4, 6>();
                tiles_.add_halves<1, 4, 7>();
                if (kHigh) {
                    tiles_.load<5>(left + 16 * f.left_stride, left_bytes);
                    tiles_.add_halves<2, 5, 6>();
                    tiles_.add_halves<3, 5, 7>();
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

    static constexpr TileShapes kShapes = half_shapes();
    Tiles tiles_{kShapes};
#else
  public:
    static constexpr std::int64_t kBlockRows = kRegisterRows;

    void multiply(const Factors<Number>& f, Ahead& ahead) { multiply_in_registers<Halves, false>(f, ahead); }
#endif
};

#endif
