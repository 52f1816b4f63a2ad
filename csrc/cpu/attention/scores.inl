// Makes weights of products of queries and keys.

// tanh(x) = 1 - 2 / (e^2x + 1)
inline F8 tanh8(F8 x) {
    const F8 e = exp8(mul8(x, set8(2.0F)));
    return sub8(set8(1.0F), div8(set8(2.0F), add8(e, set8(1.0F))));
}

// What products are multiplied with to become scores, or what the cap takes the tanh of.
inline float score_factor(const AttentionJob& job, std::int64_t kv_head) {
    const KvPages& pages = job.kv;
    const float unit = pages.dtype == DType::kE4M3 ? kE4M3Factor : 1.0F;
    const float scale = job.scale * static_scale(pages.keys, kv_head) * unit;
    return job.soft_cap > 0 ? scale / job.soft_cap : scale * kLog2E;
}

inline void multiply_by(float* row, const float* factors, Range range) {
    for (std::int64_t j = range.from; j < range.end; j += Lanes::kCount) {
        Lanes::store(row + j, Lanes::mul(Lanes::load(row + j), Lanes::load(factors + j)));
    }
}

// Whether a score is more than a product times a factor that is not negative.
inline bool special(const AttentionJob& job) {
    return job.soft_cap > 0 || job.alibi != nullptr || job.bias != nullptr || job.scale < 0;
}

// What is added to the scores of eight keys, the first of which is so far after its query.
inline F8 bias_at(const AttentionJob& job, std::int64_t head, std::int64_t distance) {
    const std::int64_t reach = job.bias_reach;
    const float* own = job.bias + head * (2 * reach + 1) + reach;
    if (-reach <= distance && distance + 7 <= reach) {
        return load8(own + distance);
    }
    float some[8];
    for (std::int64_t i = 0; i < 8; ++i) {
        const std::int64_t most = distance + i < reach ? distance + i : reach;
        some[i] = own[most > -reach ? most : -reach];
    }
    return load8(some);
}

// Products of a row become scores.
inline void adjust(const AttentionJob& job, const Row& row, float factor, std::int64_t first, Range range,
                   float* scores) {
    constexpr float kSteps[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    for (std::int64_t j = range.from; j < range.end; j += 8) {
        F8 x = mul8(load8(scores + j), set8(factor));
        if (job.soft_cap > 0) {
            x = mul8(tanh8(x), set8(job.soft_cap * kLog2E));
        }
        if (job.alibi) {
            const F8 distance = add8(set8(static_cast<float>(first + j - row.position)), load8(kSteps));
            x = fma8(set8(job.alibi[row.head] * kLog2E), distance, x);
        }
        if (job.bias) {
            x = fma8(set8(kLog2E), bias_at(job, row.head, first + j - row.position), x);
        }
        store8(scores + j, x);
    }
}

inline void multiply_row(float* row, std::int64_t count, Lanes::F factor) {
    for (std::int64_t i = 0; i < count; i += Lanes::kCount) {
        Lanes::store(row + i, Lanes::mul(Lanes::load(row + i), factor));
    }
}

// What a row has summed up becomes relative to a larger maximum.
template <typename Form>
inline void lower(const Scratch<Form>& s, std::int64_t i, Lanes::F drop) {
    float* totals = s.totals + i * Lanes::kCount;
    multiply_row(s.sums + i * s.dim, s.dim, drop);
    store8(totals, mul8(load8(totals), Lanes::low(drop)));
}

// The largest of the scores of a row, lane by lane.
template <bool kAll>
__attribute__((always_inline)) inline Lanes::F tops_of(const float* scores, KeyBits seen, Range range) {
    const auto at = [&](std::int64_t j) __attribute__((always_inline)) {
        const Lanes::F x = Lanes::load(scores + j);
        return kAll ? x : Lanes::choose(seen >> j, x, Lanes::set(kNone));
    };
    Lanes::F tops = at(range.from);
#pragma GCC unroll 4
    for (std::int64_t j = range.from + Lanes::kCount; j < range.end; j += Lanes::kCount) {
        tops = Lanes::max(tops, at(j));
    }
    return tops;
}

// Of up to kCount rows that see all keys of the range.
template <typename Form>
__attribute__((always_inline)) inline void raise_rows(const Scratch<Form>& s, std::int64_t row, std::int64_t count,
                                                      const float* scores, float factor, Range range) {
    Lanes::F tops[Lanes::kCount];
#pragma GCC unroll 16
    for (int i = 0; i < Lanes::kCount; ++i) {
        tops[i] = i < Form::kBlockRows ? tops_of<true>(scores + i * kKeyTile, 0, range) : Lanes::set(kNone);
    }
    const Lanes::F top = Lanes::mul(Lanes::tops(tops), Lanes::set(factor)), before = Lanes::load(s.maxima + row);
    const std::uint32_t more = Lanes::more(top, before) & (count < Lanes::kCount ? (1U << count) - 1 : ~0U);
    if (more == 0) {
        return;
    }
    Lanes::store(s.maxima + row, Lanes::choose(more, top, before));
    float drops[Lanes::kCount];
    Lanes::store(drops, power(Lanes::sub(before, top)));
    // A row that has seen no key has nothing summed up yet.
    for (std::uint32_t rows = more & Lanes::more(before, Lanes::set(kNone)); rows != 0; rows &= rows - 1) {
        const int i = __builtin_ctz(rows);
        lower(s, row + i, Lanes::set(drops[i]));
    }
}

// Scores of a row, which are products times `factor`, become weights relative to the largest one so far, times the
// scales of values.
template <typename Form, bool kAll>
__attribute__((always_inline)) inline void weigh(const Scratch<Form>& s, std::int64_t i, const float* scores,
                                                 typename Form::Number* weights, float factor, Range range,
                                                 const Slots& values) {
    using F = Lanes::F;
    constexpr int kWide = Form::kWeights / Lanes::kCount;
    const KeyBits seen = s.rows[i].seen;
    const F maximum = Lanes::set(-s.maxima[i]);
    float* totals = s.totals + i * Lanes::kCount;
    F8 total = load8(totals);
    for (std::int64_t d = 0; d < s.dim; d += 16) {  // what its products will be added to
        fetch(s.sums + i * s.dim + d);
    }
#pragma GCC unroll 4
    for (std::int64_t from = range.from; from < range.end; from += Form::kWeights) {
        F x[kWide];
#pragma GCC unroll 4
        for (int g = 0; g < kWide; ++g) {
            const std::int64_t j = from + g * Lanes::kCount;
            x[g] = power(Lanes::fma(Lanes::load(scores + j), Lanes::set(factor), maximum));
            x[g] = kAll ? x[g] : Lanes::choose(seen >> j, x[g], Lanes::zero());
            total = Lanes::add_eights(total, x[g]);
            if (values.scaled) {  // a scale that is no number is one to rows that see it
                x[g] = Lanes::mul(x[g], Lanes::load(values.scales + j));
                x[g] = kAll ? x[g] : Lanes::choose(seen >> j, x[g], Lanes::zero());
            }
        }
        Form::put_weights(x, weights + from);
    }
    store8(totals, total);
}

template <typename Form>
inline bool see_all(const Scratch<Form>& s, std::int64_t row, std::int64_t count) {
    return s.whole || all_see(s.rows + row, count, bits_between(0, s.tile));
}

// Calls run(the keys from 0 on that rows who see a whole tile see), known to the compiler.
template <typename Form, typename Run>
__attribute__((always_inline)) inline void with_whole(const Scratch<Form>& s, const Run& run) {
    s.tile == kKeyTile ? run(Range{0, kKeyTile}) : run(Range{0, kKeyTile / 2});
}

// `count` rows from `row` on, a part of a block, whose scores begin there.
template <typename Form>
inline void raise(const Scratch<Form>& s, std::int64_t row, std::int64_t count, const float* scores, float factor,
                  Range range) {
    if (see_all(s, row, count)) {
        return with_whole(s, [&](Range whole) __attribute__((always_inline)) {
            for (std::int64_t i = 0; i < count; i += Lanes::kCount) {
                raise_rows(s, row + i, count - i, scores + i * kKeyTile, factor, whole);
            }
        });
    }
    for (std::int64_t i = row; i < row + count; ++i, scores += kKeyTile) {
        const float top = Lanes::top(tops_of<false>(scores, s.rows[i].seen, range)) * factor;
        float& before = s.maxima[i];
        if (top > before) {
            if (before != kNone) {
                lower(s, i, power(Lanes::set(before - top)));
            }
            before = top;
        }
    }
}

template <typename Form>
inline void weigh_rows(const Scratch<Form>& s, std::int64_t row, std::int64_t count, const float* scores,
                       typename Form::Number* weights, float factor, Range range, const Slots& values) {
    if (see_all(s, row, count)) {
        return with_whole(s, [&](Range whole) __attribute__((always_inline)) {
            for (std::int64_t i = 0; i < count; ++i) {
                weigh<Form, true>(s, row + i, scores + i * kKeyTile, weights + i * kKeyTile, factor, whole, values);
            }
        });
    }
    for (std::int64_t i = row; i < row + count; ++i, scores += kKeyTile, weights += kKeyTile) {
        if (s.rows[i].seen != 0) {
            weigh<Form, false>(s, i, scores, weights, factor, range, values);
        } else {
            std::memset(weights, 0, static_cast<std::size_t>(kKeyTile) * sizeof(*weights));
        }
    }
}
