// Products in float32, for pages of every type that bf16_pairs.inl does not take.

struct Floats {
    using Number = float;
    static constexpr std::int64_t kPair = 1, kRowStep = 1, kDimStep = Lanes::kCount, kKeyStep = 16,
                                  kPieceStep = kDimStep;
    static constexpr std::int64_t kBlockRows = kRegisterRows;

    static Lanes::F spread(const float* x) { return Lanes::set(*x); }
    static Lanes::F add(Lanes::F sum, Lanes::F x, Lanes::F y) { return Lanes::fma(x, y, sum); }
    void multiply(const Factors<float>& f, Ahead& ahead) { multiply_in_registers<Floats>(f, Packed{}, ahead); }

    static constexpr bool kInPlace = true;
    // How many rows take keys, or values, from where they lie. It is what was measured to be faster.
    static std::int64_t most_turned(const KvPages& pages) {
        return Lanes::kCount == 16 && pages.dtype == DType::kF32 && pages.head_dim <= 64 ? 0 : kBlockRows;
    }
    static std::int64_t most_in_place(const KvPages&) { return kBlockRows; }
    static void multiply_keys(const KvPages& pages, const Slots& slots, Range range, const Factors<float>& f,
                              Ahead& ahead) {
        with_type(pages.dtype,
                  [&](auto type) { octavo::multiply_keys<Floats, decltype(type)::value>(f, slots, range, ahead); });
    }
    static void multiply_values(const KvPages& pages, const Group* groups, const Factors<float>& f, Ahead& ahead) {
        with_type(pages.dtype,
                  [&](auto type) { multiply_in_registers<Floats>(f, InPlace<decltype(type)::value>{groups}, ahead); });
    }

    static void put_query(const float* from, std::int64_t dim, float* to) {
        std::memcpy(to, from, static_cast<std::size_t>(dim) * 4);
    }
    static constexpr int kWeights = Lanes::kCount;  // put down together
    static void put_weights(const Lanes::F (&x)[1], float* to) { Lanes::store(to, x[0]); }
    static float value(float x) { return x; }

    static void pack_keys(const KvPages& pages, const Slots& slots, Range range, Scratch<Floats>& s, Ahead& asked) {
        with_type(pages.dtype, [&](auto type) {
            pack_keys_of<Floats, decltype(type)::value>(pages.head_dim, slots, range, s, asked);
        });
    }
    // Whether all of them are finite.
    static bool pack_values(const KvPages& pages, const Slots& slots, Range range, Scratch<Floats>& s, Ahead& asked) {
        bool finite = false;
        with_type(pages.dtype, [&](auto type) {
            finite = pack_values_of<decltype(type)::value>(pages.head_dim, slots, range, s.values, s.dim, asked);
        });
        return finite;
    }

    // How many dimensions a lane holds while keys are turned, and how many keys' values are taken together.
    template <DType kType>
    static constexpr std::int64_t kInLane = kParts<kType>;
    template <DType kType>
    static constexpr std::int64_t kTogether = 1;

    template <DType kType>
    static Lanes::F load_words(const char* p, std::int64_t count) {
        constexpr std::int64_t kEach = kParts<kType>;
        if constexpr (kEach > 1) {
            return Lanes::load_some(reinterpret_cast<const float*>(p), count / kEach);
        }
        return Lanes::widen<kType>(p, count);
    }
    template <DType kType, typename Use>
    __attribute__((always_inline)) static void take_apart(Lanes::F words, std::int64_t d, const Use& use) {
        if constexpr (kParts<kType> == 1) {
            use(words, d);
        } else {
            use(Lanes::part<kType, 0>(words), d);
            use(Lanes::part<kType, 1>(words), d + 1);
        }
        if constexpr (kParts<kType> == 4) {
            use(Lanes::part<kType, 2>(words), d + 2);
            use(Lanes::part<kType, 3>(words), d + 3);
        }
    }
    template <DType kType, int kWide, typename Use>
    __attribute__((always_inline)) static void each_value(const char* p, std::int64_t, std::int64_t key,
                                                          const Use& use) {
        use(key, [p](int g) __attribute__((always_inline)) {
            return Lanes::widen<kType>(p + g * Lanes::kCount * kSize<kType>, Lanes::kCount);
        });
    }

  private:
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
                    const Lanes::F x = Lanes::widen<kType>(lanes.at(i) + d * kSize<kType>, dim - d);
                    zeros = Lanes::either(zeros, Lanes::mul(x, Lanes::zero()));
                    Lanes::store(row + d, x);
                }
            }
        }
        asked = ahead;
        return Lanes::sum(zeros) == 0.0F;
    }
};
