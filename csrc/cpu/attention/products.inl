// Multiplies rows of numbers, which are queries or weights, with packed keys or values. A form (floats.inl, halves.inl)
// says what numbers are. A result is one sum in the order of dimensions or of keys, whatever is computed beside it;
// keys that a row does not see add zeros, which change nothing.

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
    bool add;             // to what is in `out`
    const Group* groups;  // not null: eight of `inner` lie in each of these, and not in `right`
};

template <typename Form, bool kInPlace, int kRows, int kWide>
inline void multiply_some(const Factors<typename Form::Number>& f, std::int64_t column, Ahead& asked) {
    using F = Lanes::F;
    const auto* left = f.left;
    float* out = f.out + column;
    Ahead ahead = asked;  // a copy stays in registers
    F sums[kRows][kWide];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < kWide; ++g) {
            sums[r][g] = f.add ? Lanes::load(out + r * f.out_stride + g * Lanes::kCount) : Lanes::zero();
        }
    }
    const auto step = [&](const float* right, std::int64_t k) __attribute__((always_inline)) {
        F x[kWide];
#pragma GCC unroll 4
        for (int g = 0; g < kWide; ++g) {
            x[g] = Lanes::load(right + g * Lanes::kCount);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const auto y = Form::spread(left + r * f.left_stride + k);
#pragma GCC unroll 4
            for (int g = 0; g < kWide; ++g) {
                sums[r][g] = Form::add(sums[r][g], x[g], y);
            }
        }
    };
    if constexpr (kInPlace) {
        for (std::int64_t k = 0; k < f.inner; k += 8) {
            const char* at = f.groups[k / 8].at + 4 * column;
            for (std::int64_t slot = 0; slot < 8; ++slot, at += f.groups[k / 8].stride) {
                ahead.ask(kWide);
                step(reinterpret_cast<const float*>(at), k + slot);
            }
        }
    } else {
        const auto* right = f.right + column * Form::kPair;
        for (std::int64_t k = 0; k < f.inner; k += Form::kPair, right += f.right_stride) {
            ahead.ask(1);
            step(reinterpret_cast<const float*>(right), k);
        }
    }
    asked = ahead;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int g = 0; g < kWide; ++g) {
            Lanes::store(out + r * f.out_stride + g * Lanes::kCount, sums[r][g]);
        }
    }
}

template <typename Form, bool kInPlace, int kRows>
inline void multiply_rows(const Factors<typename Form::Number>& f, Ahead& ahead) {
    constexpr int kWide = Lanes::kCount == 16 && kRows <= 6 ? 4 : 2;  // of 32 registers or of 16
    std::int64_t column = 0;
    for (; column + kWide * Lanes::kCount <= f.columns; column += kWide * Lanes::kCount) {
        multiply_some<Form, kInPlace, kRows, kWide>(f, column, ahead);
    }
    if (kWide == 4 && column + 2 * Lanes::kCount <= f.columns) {
        multiply_some<Form, kInPlace, kRows, 2>(f, column, ahead);
        column += 2 * Lanes::kCount;
    }
    if (column < f.columns) {
        multiply_some<Form, kInPlace, kRows, 1>(f, column, ahead);
    }
}

constexpr int kRegisterRows = Lanes::kCount == 16 ? 8 : 6;  // computed together

template <typename Form, bool kInPlace, int kRows = kRegisterRows>
inline void multiply_in_registers(const Factors<typename Form::Number>& f, Ahead& ahead) {
    if (f.rows == kRows) {
        return multiply_rows<Form, kInPlace, kRows>(f, ahead);
    }
    if constexpr (kRows > 1) {
        multiply_in_registers<Form, kInPlace, kRows - 1>(f, ahead);
    }
}
