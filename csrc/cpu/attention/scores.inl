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
inline bool special(const AttentionJob& job) { return job.soft_cap > 0 || job.alibi != nullptr || job.scale < 0; }

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
        store8(scores + j, x);
    }
}

inline void multiply_row(float* row, std::int64_t count, Lanes::F factor) {
    for (std::int64_t i = 0; i < count; i += Lanes::kCount) {
        Lanes::store(row + i, Lanes::mul(Lanes::load(row + i), factor));
    }
}

// Scores of a row, which are products times `factor`, become weights relative to the largest one so far, times the
// scales of values.
template <typename Form, bool kAll>
__attribute__((always_inline)) inline void soften_range(const Scratch<Form>& s, std::int64_t i, const float* scores,
                                                        typename Form::Number* weights, float factor, Range range,
                                                        const Slots& values) {
    using F = Lanes::F;
    Row& row = s.rows[i];
    float* totals = s.totals + i * Lanes::kCount;
    const auto bits = [&row](std::int64_t j) { return row.seen >> j; };
    F tops = Lanes::set(kNone);
#pragma GCC unroll 4
    for (std::int64_t j = range.from; j < range.end; j += Lanes::kCount) {
        const F x = Lanes::load(scores + j);
        tops = Lanes::max(tops, kAll ? x : Lanes::choose(bits(j), x, Lanes::set(kNone)));
    }
    const float top = Lanes::top(tops) * factor;
    if (top > row.maximum && row.maximum == kNone) {  // nothing is summed up yet
        row.maximum = top;
    } else if (top > row.maximum) {
        const F drop = power(Lanes::set(row.maximum - top));
        multiply_row(s.sums + i * s.dim, s.dim, drop);
        store8(totals, mul8(load8(totals), Lanes::low(drop)));
        row.maximum = top;
    }
    F8 total = load8(totals);
#pragma GCC unroll 4
    for (std::int64_t j = range.from; j < range.end; j += Lanes::kCount) {
        F x = power(Lanes::fma(Lanes::load(scores + j), Lanes::set(factor), Lanes::set(-row.maximum)));
        x = kAll ? x : Lanes::choose(bits(j), x, Lanes::zero());
        total = Lanes::add_eights(total, x);
        if (values.scaled) {  // a scale that is no number is one to rows that see it
            x = Lanes::mul(x, Lanes::load(values.scales + j));
            x = kAll ? x : Lanes::choose(bits(j), x, Lanes::zero());
        }
        Form::put_weights(x, weights + j);
    }
    store8(totals, total);
}

// The same of `count` rows from `row` on, which are a block.
template <typename Form>
inline void soften(const Scratch<Form>& s, std::int64_t row, std::int64_t count, float factor, Range range,
                   const Slots& values, std::int64_t side) {
    const float* scores = s.scores + side;
    auto* weights = s.weights + side;
    for (std::int64_t i = row; i < row + count; ++i, scores += kKeyTile, weights += kKeyTile) {
        if (s.rows[i].seen == bits_between(0, kKeyTile)) {
            soften_range<Form, true>(s, i, scores, weights, factor, {0, kKeyTile}, values);
        } else if (s.rows[i].seen == bits_between(0, s.tile)) {
            soften_range<Form, true>(s, i, scores, weights, factor, {0, kKeyTile / 2}, values);
        } else if (s.rows[i].seen != 0) {
            soften_range<Form, false>(s, i, scores, weights, factor, range, values);
        } else {
            std::memset(weights, 0, static_cast<std::size_t>(kKeyTile) * sizeof(*weights));
        }
    }
}
