// Products in float32, for pages of every type that halves.inl does not take.

struct Floats {
    using Number = float;
    static constexpr std::int64_t kPair = 1, kRowStep = 1, kDimStep = Lanes::kCount, kKeyStep = 16;
    static constexpr std::int64_t kBlockRows = kRegisterRows;

    static Lanes::F spread(const float* x) { return Lanes::set(*x); }
    static Lanes::F add(Lanes::F sum, Lanes::F x, Lanes::F y) { return Lanes::fma(x, y, sum); }
    void multiply(const Factors<float>& f, Ahead& ahead) {
        f.groups ? multiply_in_registers<Floats, true>(f, ahead) : multiply_in_registers<Floats, false>(f, ahead);
    }
    // Packing is not worth its while for one block of rows.
    static bool in_place(const KvPages& pages, std::int64_t rows) {
        return pages.dtype == DType::kF32 && rows <= kBlockRows && pages.head_dim % kDimStep == 0;
    }

    static void put_query(const float* from, std::int64_t dim, float* to) {
        std::memcpy(to, from, static_cast<std::size_t>(dim) * 4);
    }
    static void put_weights(Lanes::F weights, float* to) { Lanes::store(to, weights); }
    static float value(float x) { return x; }

    static void pack_keys(const KvPages& pages, const Slots& slots, Range range, Scratch<Floats>& s, Ahead& asked) {
        with_type(pages.dtype,
                  [&](auto type) { pack_keys_of<decltype(type)::value>(pages.head_dim, slots, range, s.keys, asked); });
    }
    // Whether all of them are finite.
    static bool pack_values(const KvPages& pages, const Slots& slots, Range range, Scratch<Floats>& s, Ahead& asked) {
        bool finite = false;
        with_type(pages.dtype, [&](auto type) {
            finite = pack_values_of<decltype(type)::value>(pages.head_dim, slots, range, s.values, s.dim, asked);
        });
        return finite;
    }

  private:
    template <DType kType>
    static void pack_keys_of(std::int64_t dim, const Slots& slots, Range range, float* to, Ahead& asked) {
        constexpr std::int64_t kLines = lines_for(Lanes::kCount * Lanes::kCount * kSize<kType>);
        Ahead ahead = asked;
        for (std::int64_t key = range.from; key < range.end; key += Lanes::kCount) {
            const SlotLanes lanes(slots, key);
            for (std::int64_t d = 0; d < dim; d += Lanes::kCount) {
                Lanes::F x[Lanes::kCount];
#pragma GCC unroll 16
                for (int i = 0; i < Lanes::kCount; ++i) {
                    x[i] = Lanes::widen<kType>(lanes.at[i] + d * kSize<kType>, dim - d);
                }
                ahead.ask(kLines);
                Lanes::transpose(x);
                const std::int64_t rest = dim - d;
#pragma GCC unroll 16
                for (int i = 0; i < Lanes::kCount; ++i) {
                    if (i < 8 || i < rest) {
                        Lanes::store(to + (d + i) * kKeyTile + key, x[i]);
                    }
                }
            }
        }
        asked = ahead;
    }
    template <DType kType>
    static bool pack_values_of(std::int64_t dim, const Slots& slots, Range range, float* to, std::int64_t stride,
                               Ahead& asked) {
        Lanes::F zeros = Lanes::zero();
        Ahead ahead = asked;
        for (std::int64_t key = range.from; key < range.end; key += Lanes::kCount) {
            const SlotLanes lanes(slots, key);
            for (std::int64_t i = 0; i < Lanes::kCount; ++i) {
                float* row = to + (key + i) * stride;
                if (i % 2 == 0) {
                    ahead.ask(lines_for(2 * dim * kSize<kType>));
                }
                for (std::int64_t d = 0; d < dim; d += Lanes::kCount) {
                    const Lanes::F x = Lanes::widen<kType>(lanes.at[i] + d * kSize<kType>, dim - d);
                    zeros = Lanes::either(zeros, Lanes::mul(x, Lanes::zero()));
                    Lanes::store(row + d, x);
                }
            }
        }
        asked = ahead;
        return Lanes::sum(zeros) == 0.0F;
    }
};
