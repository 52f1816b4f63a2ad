// Multiplies rows of numbers, which are queries or weights, with packed keys or values. A form (floats.inl,
// bf16_pairs.inl) says what numbers are. A result is one sum in the order of dimensions or of keys, whatever is
// computed beside it; keys that a row does not see add zeros, which change nothing.

// Numbers [rows, inner] times [inner, columns] in which kPair neighbours of `inner` lie beside each other.
template <typename Number>
struct Factors {
    const Number* left;
    std::int64_t left_stride;
    const Number* right;
    std::int64_t right_stride;  // from one pair to the next
    std::int64_t inner;
    float* out;
    std::int64_t out_stride;
    std::int64_t rows, columns;
    bool add;  // to what is in `out`
};

// One block of keys in registers, a key per lane: calls use(x, d) for dimension d, or for the pair that begins there,
// of those from `d` on; numbers past `dim` are zeros, and those from `end` on are left out.
template <typename Form, DType kType>
constexpr std::int64_t kTurned = Lanes::kCount * Form::template kInLane<kType>;

// It asks for as many lines as it reads one by one, or, where `kFewer`, for half of them at once.
template <typename Form, DType kType, bool kFewer, typename Use>
__attribute__((always_inline)) inline void turn(const SlotLanes& lanes, std::int64_t d, std::int64_t dim,
                                                std::int64_t end, Ahead& ahead, const Use& use) {
    constexpr std::int64_t kEach = Form::template kInLane<kType>;
    constexpr int kOften = static_cast<int>(64 / (Lanes::kCount * kEach * kSize<kType>));
    Lanes::F x[Lanes::kCount];
#pragma GCC unroll 16
    for (int i = 0; i < Lanes::kCount; ++i) {
        x[i] = Form::template load_words<kType>(lanes.at(i) + d * kSize<kType>, dim - d);
    }
    if (kFewer) {
        ahead.ask(lines_for(kTurned<Form, kType> * Lanes::kCount * kSize<kType>));
    }
    Lanes::transpose(x);
    if (end - d >= kTurned<Form, kType>) {
#pragma GCC unroll 16
        for (int i = 0; i < Lanes::kCount; ++i) {
            Form::template take_apart<kType>(x[i], d + i * kEach, use);
            if (!kFewer && i % kOften == 0) {
                ahead.ask(1);
            }
        }
        return;
    }
    float turned[Lanes::kCount * Lanes::kCount];
    for (int i = 0; i < Lanes::kCount; ++i) {
        Lanes::store(turned + i * Lanes::kCount, x[i]);
    }
    for (const float* word = turned; d < end; d += kEach, word += Lanes::kCount) {
        Form::template take_apart<kType>(Lanes::load(word), d, use);
    }
}

template <typename Form, DType kType>
void pack_keys_of(std::int64_t dim, const Slots& slots, Range range, Scratch<Form>& s, Ahead& asked) {
    auto* to = reinterpret_cast<float*>(s.keys);
    Ahead ahead = asked;  // a copy stays in registers
    for (std::int64_t key = range.from; key < range.end; key += Lanes::kCount) {
        const SlotLanes lanes(slots, key);
        for (std::int64_t d = 0; d < s.dim; d += kTurned<Form, kType>) {
            turn<Form, kType, true>(lanes, d, dim, s.dim, ahead,
                                    [&](Lanes::F x, std::int64_t at) __attribute__((always_inline)) {
                                        Lanes::store(to + at / Form::kPair * kKeyTile + key, x);
                                    });
        }
    }
    asked = ahead;
}

// The products of queries with kWide registers of keys where they lie.
template <typename Form, DType kType, int kRows, int kWide>
inline void multiply_turned(const Factors<typename Form::Number>& f, const Slots& slots, std::int64_t key,
                            Ahead& asked) {
    const SlotLanes lanes[2] = {SlotLanes(slots, key), SlotLanes(slots, key + (kWide - 1) * Lanes::kCount)};
    Ahead ahead = asked;
    Lanes::F sums[kWide][kRows];
#pragma GCC unroll 2
    for (int g = 0; g < kWide; ++g) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            sums[g][r] = Lanes::zero();
        }
    }
    for (std::int64_t d = 0; d < f.inner; d += kTurned<Form, kType>) {
#pragma GCC unroll 2
        for (int g = 0; g < kWide; ++g) {
            const auto add = [&](Lanes::F x, std::int64_t at) __attribute__((always_inline)) {
#pragma GCC unroll 8
                for (int r = 0; r < kRows; ++r) {
                    sums[g][r] = Form::add(sums[g][r], x, Form::spread(f.left + r * f.left_stride + at));
                }
            };
            turn<Form, kType, false>(lanes[g], d, f.inner, f.inner, ahead, add);
        }
    }
    asked = ahead;
#pragma GCC unroll 2
    for (int g = 0; g < kWide; ++g) {
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            Lanes::store(f.out + r * f.out_stride + key + g * Lanes::kCount, sums[g][r]);
        }
    }
}

template <typename Form, DType kType, int kRows = Form::kBlockRows>
inline void multiply_keys(const Factors<typename Form::Number>& f, const Slots& slots, Range range, Ahead& ahead) {
    if (f.rows == kRows) {
        constexpr int kWide = kRows <= (Lanes::kCount == 16 ? 4 : 3) ? 2 : 1;
        std::int64_t key = range.from;
        for (; key + kWide * Lanes::kCount <= range.end; key += kWide * Lanes::kCount) {
            multiply_turned<Form, kType, kRows, kWide>(f, slots, key, ahead);
        }
        if (key < range.end) {
            multiply_turned<Form, kType, kRows, 1>(f, slots, key, ahead);
        }
        return;
    }
    if constexpr (kRows > 1) {
        multiply_keys<Form, kType, kRows - 1>(f, slots, range, ahead);
    }
}

// Where the right side lies: packed, or eight of `inner` in each of these groups.
struct Packed {};
template <DType kType>
struct InPlace {
    const Group* groups;
};

template <typename Form, int kWide, typename Use>
__attribute__((always_inline)) inline void each_right(const Factors<typename Form::Number>& f, std::int64_t column,
                                                      Packed, Ahead& ahead, const Use& use) {
    const auto* right = f.right + column * Form::kPair;
    for (std::int64_t k = 0; k < f.inner; k += Form::kPair, right += f.right_stride) {
        ahead.ask(1);
        use(k, [right](int g) __attribute__((always_inline)) {
            return Lanes::load(reinterpret_cast<const float*>(right) + g * Lanes::kCount);
        });
    }
}

template <typename Form, int kWide, DType kType, typename Use>
__attribute__((always_inline)) inline void each_right(const Factors<typename Form::Number>& f, std::int64_t column,
                                                      InPlace<kType> values, Ahead& ahead, const Use& use) {
    constexpr std::int64_t kKeys = Form::template kTogether<kType>;
    constexpr std::int64_t kBytes = kKeys * kWide * Lanes::kCount * kSize<kType>,
                           kOften = kBytes < 64 ? 64 / kBytes : 1;
    for (std::int64_t k = 0; k < f.inner; k += 8) {
        const Group& group = values.groups[k / 8];
        const char* at = group.at + column * kSize<kType>;
        for (std::int64_t slot = 0; slot < 8; slot += kKeys, at += kKeys * group.stride) {
            if (slot / kKeys % kOften == 0) {
                ahead.ask(kOften * kBytes / 64);
            }
            Form::template each_value<kType, kWide>(at, group.stride, k + slot, use);
        }
    }
}

template <typename Form, int kRows, int kWide, typename Right>
inline void multiply_some(const Factors<typename Form::Number>& f, std::int64_t column, Right right, Ahead& asked) {
    using F = Lanes::F;
    const auto* left = f.left;
    float* out = f.out + column;
    Ahead ahead = asked;
    F sums[kRows][kWide];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < kWide; ++g) {
            sums[r][g] = f.add ? Lanes::load(out + r * f.out_stride + g * Lanes::kCount) : Lanes::zero();
        }
    }
    using Spread = decltype(Form::spread(left));
    const auto add = [&](std::int64_t k, const auto& load) __attribute__((always_inline)) {
        if constexpr (kRows < kWide) {
            Spread y[kRows];
#pragma GCC unroll 4
            for (int r = 0; r < kRows; ++r) {
                y[r] = Form::spread(left + r * f.left_stride + k);
            }
#pragma GCC unroll 4
            for (int g = 0; g < kWide; ++g) {
                const F x = load(g);
#pragma GCC unroll 4
                for (int r = 0; r < kRows; ++r) {
                    sums[r][g] = Form::add(sums[r][g], x, y[r]);
                }
            }
        } else {
            F x[kWide];
#pragma GCC unroll 4
            for (int g = 0; g < kWide; ++g) {
                x[g] = load(g);
            }
#pragma GCC unroll 8
            for (int r = 0; r < kRows; ++r) {
                const Spread y = Form::spread(left + r * f.left_stride + k);
#pragma GCC unroll 4
                for (int g = 0; g < kWide; ++g) {
                    sums[r][g] = Form::add(sums[r][g], x[g], y);
                }
            }
        }
    };
    each_right<Form, kWide>(f, column, right, ahead, add);
    asked = ahead;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < kWide; ++g) {
            Lanes::store(out + r * f.out_stride + g * Lanes::kCount, sums[r][g]);
        }
    }
}

template <typename Form, int kRows, typename Right>
inline void multiply_rows(const Factors<typename Form::Number>& f, Right right, Ahead& ahead) {
    constexpr int kWide = (Lanes::kCount == 16 ? kRows <= 6 : kRows <= 3) ? 4 : 2;  // of 32 registers or of 16
    std::int64_t column = 0;
    for (; column + kWide * Lanes::kCount <= f.columns; column += kWide * Lanes::kCount) {
        multiply_some<Form, kRows, kWide>(f, column, right, ahead);
    }
    if (kWide == 4 && column + 2 * Lanes::kCount <= f.columns) {
        multiply_some<Form, kRows, 2>(f, column, right, ahead);
        column += 2 * Lanes::kCount;
    }
    if constexpr (Form::kDimStep == Lanes::kCount) {
        if (column < f.columns) {
            multiply_some<Form, kRows, 1>(f, column, right, ahead);
        }
    }
}

#if defined(__AVX2__)
constexpr int kRegisterRows = Lanes::kCount == 16 ? 8 : 6;  // computed together
#else
constexpr int kRegisterRows = 3;  // eight floats take two registers
#endif

template <typename Form, int kRows = kRegisterRows, typename Right>
inline void multiply_in_registers(const Factors<typename Form::Number>& f, Right right, Ahead& ahead) {
    if (f.rows == kRows) {
        return multiply_rows<Form, kRows>(f, right, ahead);
    }
    if constexpr (kRows > 1) {
        multiply_in_registers<Form, kRows - 1>(f, right, ahead);
    }
}
