// What a low-rank adapter adds to a row: columns of b beside each other in registers, so that each sum has the order of
// k.

template <Format kFormat, int kRegisters>
inline void add_low_rank_tile(const Weight& b, std::int64_t first, const float* low, float* y) {
    F8 sums[kRegisters];
    for (int r = 0; r < kRegisters; ++r) {
        sums[r] = zero8();
    }
    for (std::int64_t k = 0; k < b.rows; ++k) {
        const F8 x = set8(low[k]);
        for (int r = 0; r < kRegisters; ++r) {
            sums[r] = fma8(load_weight<kFormat>(b.data, k * b.stride + first + 8 * r), x, sums[r]);
        }
    }
    for (int r = 0; r < kRegisters; ++r) {
        store8(y + 8 * r, add8(load8(y + 8 * r), sums[r]));
    }
}

template <Format kFormat>
void add_low_rank_columns(const Weight& b, std::int64_t first, std::int64_t count, const float* low, float* y) {
    std::int64_t i = 0;
    for (; i + 64 <= count; i += 64) {
        add_low_rank_tile<kFormat, 8>(b, first + i, low, y + i);
    }
    for (; i + 8 <= count; i += 8) {
        add_low_rank_tile<kFormat, 1>(b, first + i, low, y + i);
    }
    if (i < count) {
        F8 sums = zero8();
        for (std::int64_t k = 0; k < b.rows; ++k) {
            sums = fma8(load_weights<kFormat>(b.data, k * b.stride + first + i, count - i), set8(low[k]), sums);
        }
        float wide[8];
        store8(wide, sums);
        for (std::int64_t j = 0; j < count - i; ++j) {
            y[i + j] += wide[j];
        }
    }
}

void add_low_rank(const Weight& b, std::int64_t first, std::int64_t count, const float* low, float* y) {
    switch (b.format) {
        case Format::kF16:
            return add_low_rank_columns<Format::kF16>(b, first, count, low, y);
        case Format::kBF16:
            return add_low_rank_columns<Format::kBF16>(b, first, count, low, y);
        default:
            return add_low_rank_columns<Format::kF32>(b, first, count, low, y);
    }
}
