// From queries and keys to weights.

// Products of `kCount` rows with eight keys: products[row], one per lane.
template <DType kType, int kCount>
inline void dot_keys(const Row* rows, const char* keys, std::int64_t stride, std::int64_t dim, F8* products) {
    constexpr int kKeys = kCount == 1 ? 8 : kCount <= 3 || kManyRegisters ? 4 : 2;  // at once
    F8 parts[kCount][2];                                                            // sums of four keys each
    for (int half = 0; half < 2; ++half) {
        F8 twos[kCount][2];
        for (int key = 0; key < 8; key += kKeys) {
            if (kKeys < 8 && key / 4 != half) {
                continue;
            }
            F8 sums[kCount][kKeys];
            for (int r = 0; r < kCount; ++r) {
                for (int j = 0; j < kKeys; ++j) {
                    sums[r][j] = zero8();
                }
            }
            for (std::int64_t d = 0; d < dim; d += 8) {
                F8 queries[kCount];
                for (int r = 0; r < kCount; ++r) {
                    queries[r] = load8(rows[r].query + d);
                }
                for (int j = 0; j < kKeys; ++j) {
                    const F8 x = load8_as<kType>(keys + (key + j) * stride + d * kSize<kType>);
                    for (int r = 0; r < kCount; ++r) {
                        sums[r][j] = fma8(x, queries[r], sums[r][j]);
                    }
                }
            }
            for (int r = 0; r < kCount; ++r) {
                if constexpr (kKeys == 8) {
                    parts[r][0] = pairs8(pairs8(sums[r][0], sums[r][1]), pairs8(sums[r][2], sums[r][3]));
                    parts[r][1] = pairs8(pairs8(sums[r][4], sums[r][5]), pairs8(sums[r][6], sums[r][7]));
                } else if constexpr (kKeys == 4) {
                    parts[r][half] = pairs8(pairs8(sums[r][0], sums[r][1]), pairs8(sums[r][2], sums[r][3]));
                } else {
                    twos[r][key % 4 / 2] = pairs8(sums[r][0], sums[r][1]);
                }
            }
        }
        if constexpr (kKeys == 8) {
            break;
        }
        if constexpr (kKeys == 2) {
            for (int r = 0; r < kCount; ++r) {
                parts[r][half] = pairs8(twos[r][0], twos[r][1]);
            }
        }
    }
    for (int r = 0; r < kCount; ++r) {
        products[r] = halves8(parts[r][0], parts[r][1]);
    }
}

// tanh(x) = 1 - 2 / (e^2x + 1)
inline F8 tanh8(F8 x) {
    const F8 e = exp8(mul8(x, set8(2.0F)));
    return sub8(set8(1.0F), div8(set8(2.0F), add8(e, set8(1.0F))));
}

// From products with the eight keys that begin at position `first`.
inline F8 scores_of(const AttentionJob& job, const Row& row, F8 products, float scale, std::int64_t first) {
    F8 scores = mul8(products, set8(scale));
    if (job.soft_cap > 0) {
        scores = mul8(tanh8(div8(scores, set8(job.soft_cap))), set8(job.soft_cap));
    }
    if (job.alibi) {
        constexpr float kSteps[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        const F8 distance = add8(set8(static_cast<float>(first - row.position)), load8(kSteps));
        scores = fma8(set8(job.alibi[row.head]), distance, scores);
    }
    return scores;
}

// What lies outside [low, high) of the eight weights from `first` on may be anything: it becomes `value`.
inline void blank(Row& row, std::int64_t first, float value) {
    if (first >= row.low && first + 8 <= row.high) {
        return;
    }
    for (std::int64_t k = first; k < first + 8; ++k) {
        row.weights[k] = k < row.low || k >= row.high ? value : row.weights[k];
    }
}

// Scores become weights, relative to the largest one so far.
inline void soften(Row& row, F8 tops) {
    const float top = top8(tops);
    const float next = top > row.maximum ? top : row.maximum;
    row.rescale = row.maximum == next ? 1.0F : row.maximum == kNone ? 0.0F : std::exp(row.maximum - next);
    F8 sums = zero8();
    for (std::int64_t j = row.low / 8 * 8; j < row.high; j += 8) {
        store8(row.weights + j, exp8(sub8(load8(row.weights + j), set8(next))));
        blank(row, j, 0.0F);
        sums = add8(sums, load8(row.weights + j));
    }
    row.total = row.total * row.rescale + sum8(sums);
    row.maximum = next;
}

// The weights of rows that look at the same keys of a tile, whose first position is `first`.
template <DType kType, int kCount>
inline void weigh(const AttentionJob& job, const Slots& keys, const Slots& values, float scale, std::int64_t first,
                  Row* rows, const Ahead* ahead) {
    F8 tops[kCount];
    for (int r = 0; r < kCount; ++r) {
        tops[r] = set8(kNone);
    }
    for (std::int64_t j = rows[0].low / 8 * 8; j < rows[0].high; j += 8) {
        if (ahead) {
            fetch_slots(job, ahead->keys, j / 8);
            fetch_slots(job, ahead->values, j / 8);
        }
        F8 products[kCount];
        dot_keys<kType, kCount>(rows, keys.at[j / 8], keys.stride, job.kv.head_dim, products);
        for (int r = 0; r < kCount; ++r) {
            if (keys.scales[j / 8]) {
                products[r] = mul8(products[r], load8_f16(reinterpret_cast<const std::uint16_t*>(keys.scales[j / 8])));
            }
            store8(rows[r].weights + j, scores_of(job, rows[r], products[r], scale, first + j));
            blank(rows[r], j, kNone);
            tops[r] = max8(tops[r], load8(rows[r].weights + j));
        }
    }
    for (int r = 0; r < kCount; ++r) {
        soften(rows[r], tops[r]);
        for (std::int64_t j = rows[r].low / 8 * 8; j < rows[r].high && values.scales[j / 8]; j += 8) {
            const F8 scales = load8_f16(reinterpret_cast<const std::uint16_t*>(values.scales[j / 8]));
            store8(rows[r].weights + j, mul8(load8(rows[r].weights + j), scales));
        }
    }
}
