// Multiplies weights with values.

// 8 kWide dimensions of sums += weight * value.
template <DType kType, bool kAhead, int kCount, int kWide>
inline void add_some(const Slots& values, Row* rows, std::int64_t d) {
    F8 sums[kCount][kWide];
    for (int r = 0; r < kCount; ++r) {
        for (int i = 0; i < kWide; ++i) {
            sums[r][i] = mul8(load8(rows[r].sums + d + 8 * i), set8(rows[r].rescale));
        }
    }
    for (std::int64_t j = rows[0].low; j < rows[0].high; ++j) {
        const char* value = values.at[j / 8] + j % 8 * values.stride + d * kSize<kType>;
        if constexpr (kAhead) {
            const char* ahead = values.ahead[j / 8] + j % 8 * values.stride + d * kSize<kType>;
            for (int i = 0; i < 8 * kWide * kSize<kType>; i += 64) {
                fetch_second(ahead + i);
            }
        }
        F8 weights[kCount];
        for (int r = 0; r < kCount; ++r) {
            weights[r] = set8(rows[r].weights[j]);
        }
        for (int i = 0; i < kWide; ++i) {
            const F8 x = load8_as<kType>(value + 8 * i * kSize<kType>);
            for (int r = 0; r < kCount; ++r) {
                sums[r][i] = fma8(weights[r], x, sums[r][i]);
            }
        }
    }
    for (int r = 0; r < kCount; ++r) {
        for (int i = 0; i < kWide; ++i) {
            store8(rows[r].sums + d + 8 * i, sums[r][i]);
        }
    }
}

template <DType kType, bool kAhead, int kCount>
inline void add_values(const Slots& values, std::int64_t dim, Row* rows) {
    constexpr int kWide = kCount == 1 ? 8 : kCount <= 3 || kManyRegisters ? 4 : 2;
    std::int64_t d = 0;
    for (; d + 8 * kWide <= dim; d += 8 * kWide) {
        add_some<kType, kAhead, kCount, kWide>(values, rows, d);
    }
    for (; d < dim; d += 8) {
        add_some<kType, kAhead, kCount, 1>(values, rows, d);
    }
}
