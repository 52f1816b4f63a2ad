// Computes weights from queries and keys.

// Products of `kCount` rows with eight keys: products[row], one per lane.
template <DType kType, int kCount>
inline void dot_keys(const Row* rows, const char* keys, const char* ahead, std::int64_t stride, std::int64_t dim,
                     F8* products) {
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
                if (d * kSize<kType> % 64 == 0) {
                    for (int j = 0; j < kKeys; ++j) {
                        fetch_second(ahead + (key + j) * stride + d * kSize<kType>);
                    }
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

// Sums of products of `kCount` rows with 8 kWide keys whose dimensions are apart, over every eighth dimension from d
// on: they become, or are added to, what is there.
template <bool kAdd, int kCount, int kWide>
inline void dot_eighth(const Row* rows, const char* const* keys, std::int64_t d, std::int64_t dim,
                       F8 (&there)[kCount][kWide]) {
    F8 sums[kCount][kWide];
    for (int r = 0; r < kCount; ++r) {
        for (int g = 0; g < kWide; ++g) {
            sums[r][g] = zero8();
        }
    }
    for (; d < dim; d += 8) {
        F8 x[kWide];
        for (int g = 0; g < kWide; ++g) {
            x[g] = load8(reinterpret_cast<const float*>(keys[g]) + 8 * d);
        }
        for (int r = 0; r < kCount; ++r) {
            const F8 query = set8(rows[r].query[d]);
            for (int g = 0; g < kWide; ++g) {
                sums[r][g] = fma8(x[g], query, sums[r][g]);
            }
        }
    }
    for (int r = 0; r < kCount; ++r) {
        for (int g = 0; g < kWide; ++g) {
            there[r][g] = kAdd ? add8(there[r][g], sums[r][g]) : sums[r][g];
        }
    }
}

// The products that dot_keys makes, to the bit: the same numbers are added in the same order.
template <int kCount, int kWide>
inline void dot_columns(const Row* rows, const char* const* keys, std::int64_t dim, F8 (&products)[kCount][kWide]) {
    F8 twos[4][kCount][kWide];
    for (int two = 0; two < 4; ++two) {
        dot_eighth<false>(rows, keys, 2 * two, dim, twos[two]);
        dot_eighth<true>(rows, keys, 2 * two + 1, dim, twos[two]);
    }
    for (int r = 0; r < kCount; ++r) {
        for (int g = 0; g < kWide; ++g) {
            products[r][g] = add8(add8(twos[0][r][g], twos[1][r][g]), add8(twos[2][r][g], twos[3][r][g]));
        }
    }
}

// tanh(x) = 1 - 2 / (e^2x + 1)
inline F8 tanh8(F8 x) {
    const F8 e = exp8(mul8(x, set8(2.0F)));
    return sub8(set8(1.0F), div8(set8(2.0F), add8(e, set8(1.0F))));
}

// What queries are multiplied with, so that products are scores, or what the cap takes the tanh of.
inline float query_factor(const AttentionJob& job, std::int64_t kv_head) {
    const KvPages& pages = job.kv;
    const float unit = pages.dtype == DType::kE4M3 ? kE4M3Factor : 1.0F;
    const float scale = job.scale * static_scale(pages.keys, kv_head) * unit;
    return job.soft_cap > 0 ? scale / job.soft_cap : scale * kLog2E;
}

// From products with the eight keys that begin at position `first`.
inline F8 scores_of(const AttentionJob& job, const Row& row, F8 products, std::int64_t first) {
    if (job.soft_cap > 0) {
        products = mul8(tanh8(products), set8(job.soft_cap * kLog2E));
    }
    if (job.alibi) {
        constexpr float kSteps[8] = {0, 1, 2, 3, 4, 5, 6, 7};
        const F8 distance = add8(set8(static_cast<float>(first - row.position)), load8(kSteps));
        products = fma8(set8(job.alibi[row.head] * kLog2E), distance, products);
    }
    return products;
}

// Eight weights of a row from slot j on; what lies outside [row.low, row.high) may be anything, and becomes `value`.
inline F8 within(const Row& row, std::int64_t j, F8 weights, float value) {
    if (j >= row.low && j + 8 <= row.high) {
        return weights;
    }
    float eight[8];
    store8(eight, weights);
    for (std::int64_t i = 0; i < 8; ++i) {
        eight[i] = j + i < row.low || j + i >= row.high ? value : eight[i];
    }
    return load8(eight);
}

// Scores become weights, relative to the largest one so far.
template <int kCount>
inline void soften(Row* rows, const F8* tops) {
    float drops[8] = {};
    for (int r = 0; r < kCount; ++r) {
        const float top = top8(tops[r]), next = top > rows[r].maximum ? top : rows[r].maximum;
        drops[r] = rows[r].maximum - next;
        rows[r].maximum = next;
    }
    store8(drops, power8(load8(drops)));
    const std::int64_t low = rows[0].low / 8 * 8, high = rows[0].high;
    for (int r = 0; r < kCount; ++r) {
        Row& row = rows[r];
        row.rescale = drops[r];
        const F8 top = set8(row.maximum);
        float* weights = row.weights;
        F8 sums = zero8();
        for (std::int64_t j = low; j < high; j += 8) {
            const F8 some = within(row, j, power8(sub8(load8(weights + j), top)), 0.0F);
            store8(weights + j, some);
            sums = add8(sums, some);
        }
        row.total = row.total * row.rescale + sum8(sums);
    }
}

// Scores of `kCount` rows with the eight keys from slot j on, which is at position `first` + j.
template <int kCount>
inline void put_scores(const AttentionJob& job, const Slots& keys, std::int64_t first, std::int64_t j, Row* rows,
                       F8* products, F8* tops) {
    if (keys.scales[j / 8]) {
        const F8 scales = load8_f16(reinterpret_cast<const std::uint16_t*>(keys.scales[j / 8]));
        for (int r = 0; r < kCount; ++r) {
            products[r] = mul8(products[r], scales);
        }
    }
    for (int r = 0; r < kCount; ++r) {
        const F8 some = within(rows[r], j, scores_of(job, rows[r], products[r], first + j), kNone);
        store8(rows[r].weights + j, some);
        tops[r] = max8(tops[r], some);
    }
}

template <int kCount, int kWide>
inline void score_columns(const AttentionJob& job, const Slots& keys, std::int64_t first, std::int64_t j, Row* rows,
                          F8* tops) {
    F8 products[kCount][kWide];
    dot_columns(rows, keys.at + j / 8, job.kv.head_dim, products);
    for (int g = 0; g < kWide; ++g) {
        F8 some[kCount];
        for (int r = 0; r < kCount; ++r) {
            some[r] = products[r][g];
        }
        put_scores<kCount>(job, keys, first, j + 8 * g, rows, some, tops);
    }
}

// The scores of rows that look at the same keys of a tile, whose first position is `first`; the largest of each lane.
template <DType kType, bool kColumns, int kCount>
inline void score(const AttentionJob& job, const Slots& keys, std::int64_t first, Row* rows, F8* tops) {
    std::int64_t j = rows[0].low / 8 * 8;
    if constexpr (kColumns) {
        constexpr int kWide = kManyRegisters || kCount <= 2 ? 4 : 2;
        for (; j + 8 * (kWide - 1) < rows[0].high; j += 8 * kWide) {
            score_columns<kCount, kWide>(job, keys, first, j, rows, tops);
        }
        for (; j < rows[0].high; j += 8) {
            score_columns<kCount, 1>(job, keys, first, j, rows, tops);
        }
    } else {
        for (; j < rows[0].high; j += 8) {
            F8 products[kCount];
            dot_keys<kType, kCount>(rows, keys.at[j / 8], keys.ahead[j / 8], keys.stride, job.kv.head_dim, products);
            put_scores<kCount>(job, keys, first, j, rows, products, tops);
        }
    }
}

template <DType kType, bool kColumns, int kCount>
inline void weigh(const AttentionJob& job, const Slots& keys, const Slots& values, std::int64_t first, Row* rows) {
    F8 tops[kCount];
    for (int r = 0; r < kCount; ++r) {
        tops[r] = set8(kNone);
    }
    score<kType, kColumns, kCount>(job, keys, first, rows, tops);
    soften<kCount>(rows, tops);
    for (int r = 0; r < kCount; ++r) {
        for (std::int64_t j = rows[r].low / 8 * 8; j < rows[r].high && values.scales[j / 8]; j += 8) {
            const F8 scales = load8_f16(reinterpret_cast<const std::uint16_t*>(values.scales[j / 8]));
            store8(rows[r].weights + j, mul8(load8(rows[r].weights + j), scales));
        }
    }
}
