// Tokens that read and change a matrix, one after another. Its columns are independent: some lie side by side in
// registers, and sums over rows follow the order of rows. For matrices of one column (recur_lines), eight partial sums
// are added at the end.

// Where the numbers of a token for a head are.
struct RecurringToken {
    const float *query, *key, *value, *decay;
    float rate;
    float* out;
};

inline RecurringToken token_of(const RecurrenceJob& job, std::int64_t token, std::int64_t head) {
    const std::int64_t narrow = head / job.group * job.key_dim, wide = head * job.value_dim;
    const std::int64_t fades = job.decay_per_key ? job.key_dim : 1;
    return {job.queries + token * job.queries_apart + narrow,
            job.keys + token * job.keys_apart + narrow,
            job.values + token * job.values_apart + wide,
            job.decays + token * job.decays_apart + head * fades,
            job.rates == nullptr ? 0 : job.rates[token * job.rates_apart + head],
            job.out + token * job.out_apart + wide};
}

// Columns of a matrix in registers side by side.
#if defined(__AVX512VL__)
constexpr std::int64_t kRecurringColumns = 64;
#else
constexpr std::int64_t kRecurringColumns = 32;
#endif
constexpr std::int64_t kKnownColumns = 128;  // where they are read alone, for one token: whole rows, as memory likes

// What the faded columns of a matrix give for the key.
template <int kRegisters>
inline void sum_known(const RecurringToken& t, std::int64_t fades, std::int64_t rows, const float* state,
                      std::int64_t stride, F8* known) {
    for (int r = 0; r < kRegisters; ++r) {
        known[r] = zero8();
    }
    for (std::int64_t k = 0; k < rows; ++k) {
        const F8 fading = mul8(set8(t.decay[k * fades]), set8(t.key[k]));
        const float* row = state + k * stride;
        for (int r = 0; r < kRegisters; ++r) {
            known[r] = fma8(load8(row + 8 * r), fading, known[r]);
        }
    }
}

template <int kRegisters>
inline void store_known(const RecurringToken& t, std::int64_t fades, std::int64_t rows, const float* state,
                        std::int64_t stride, float* to) {
    F8 known[kRegisters];
    sum_known<kRegisters>(t, fades, rows, state, stride, known);
    for (int r = 0; r < kRegisters; ++r) {
        store8(to + 8 * r, known[r]);
    }
}

// Columns of a head's matrix side by side in registers, whose rows lie `stride` floats apart. What a token adds is
// known when the sum of the first pass is, by the delta rule; without it there is no first pass. `given`: that sum, or
// null.
template <int kRegisters, bool kDelta>
inline void recur_token(const RecurringToken& t, std::int64_t fades, std::int64_t rows, float* state,
                        std::int64_t stride, const float* given, const F8* values, F8* outputs) {
    F8 added[kRegisters], sums[kRegisters];
    for (int r = 0; r < kRegisters; ++r) {
        added[r] = values[r];
        sums[r] = zero8();
    }
    if (kDelta) {
        F8 known[kRegisters];
        if (given == nullptr) {
            sum_known<kRegisters>(t, fades, rows, state, stride, known);
        }
        for (int r = 0; r < kRegisters; ++r) {
            known[r] = given == nullptr ? known[r] : load8(given + 8 * r);
            added[r] = mul8(sub8(added[r], known[r]), set8(t.rate));
        }
    }
    for (std::int64_t k = 0; k < rows; ++k) {
        const F8 decay = set8(t.decay[k * fades]), key = set8(t.key[k]), query = set8(t.query[k]);
        float* row = state + k * stride;
        for (int r = 0; r < kRegisters; ++r) {
            const F8 now = fma8(key, added[r], mul8(load8(row + 8 * r), decay));
            store8(row + 8 * r, now);
            sums[r] = fma8(now, query, sums[r]);
        }
    }
    for (int r = 0; r < kRegisters; ++r) {
        outputs[r] = sums[r];
    }
}

// Columns [first, first + count) of a head's matrix, which begin at `state`: 8 kRegisters of them, or fewer than 8.
template <int kRegisters, bool kDelta>
inline void recur_columns(const RecurrenceJob& job, std::int64_t head, std::int64_t first, std::int64_t count,
                          float* state, std::int64_t stride, const float* given) {
    for (std::int64_t token = 0; token < job.tokens; ++token) {
        const RecurringToken t = token_of(job, token, head);
        F8 values[kRegisters], outputs[kRegisters];
        for (int r = 0; r < kRegisters; ++r) {
            values[r] = count < 8 ? load8_some(t.value + first, count) : load8(t.value + first + 8 * r);
        }
        recur_token<kRegisters, kDelta>(t, job.decay_per_key ? 1 : 0, job.key_dim, state, stride, given, values,
                                        outputs);
        if (count < 8) {
            float some[8];
            store8(some, outputs[0]);
            std::memcpy(t.out + first, some, static_cast<std::size_t>(count) * 4);
            continue;
        }
        for (int r = 0; r < kRegisters; ++r) {
            store8(t.out + first + 8 * r, outputs[r]);
        }
    }
}

// Eight rows, or some, of a matrix of one column.
template <bool kWhole>
inline F8 recur_line(const RecurrenceJob& job, const RecurringToken& t, std::int64_t k, std::int64_t count,
                     float* state, F8 sums) {
    const auto load = [count](const float* p) { return kWhole ? load8(p) : load8_some(p, count); };
    const F8 decay = job.decay_per_key ? load(t.decay + k) : set8(t.decay[0]);
    const F8 now = fma8(load(t.key + k), set8(t.value[0]), mul8(load(state), decay));
    if (kWhole) {
        store8(state, now);
    } else {
        float some[8];
        store8(some, now);
        std::memcpy(state, some, static_cast<std::size_t>(count) * 4);
    }
    return fma8(now, load(t.query + k), sums);
}

// Heads whose matrices have one column, as channels of Mamba 1 have: rows side by side in registers.
void recur_lines(const RecurrenceJob& job, std::int64_t first_head, std::int64_t end_head) {
    for (std::int64_t token = 0; token < job.tokens; ++token) {
        for (std::int64_t head = first_head; head < end_head; ++head) {
            const RecurringToken t = token_of(job, token, head);
            float* state = job.state + head * job.key_dim;
            F8 sums = zero8();
            std::int64_t k = 0;
            for (; k + 8 <= job.key_dim; k += 8) {
                sums = recur_line<true>(job, t, k, 8, state + k, sums);
            }
            if (k < job.key_dim) {
                sums = recur_line<false>(job, t, k, job.key_dim - k, state + k, sums);
            }
            t.out[0] = sum8(sums);
        }
    }
}

template <bool kDelta>
void recur_some(const RecurrenceJob& job, std::int64_t head, std::int64_t first, std::int64_t count, float* scratch) {
    float *state = job.state + head * job.key_dim * job.value_dim + first, *known = scratch + 8 * job.key_dim;
    const bool once = kDelta && job.tokens == 1;  // the matrix comes from memory, and is read in its order
    std::int64_t i = 0;
    if (once) {
        const RecurringToken t = token_of(job, 0, head);
        const std::int64_t fades = job.decay_per_key ? 1 : 0;
        for (; i + kKnownColumns <= count; i += kKnownColumns) {
            store_known<kKnownColumns / 8>(t, fades, job.key_dim, state + i, job.value_dim, known + i);
        }
        for (; i + 8 <= count; i += 8) {
            store_known<1>(t, fades, job.key_dim, state + i, job.value_dim, known + i);
        }
        i = 0;
    }
    for (; i + kRecurringColumns <= count; i += kRecurringColumns) {
        recur_columns<kRecurringColumns / 8, kDelta>(job, head, first + i, kRecurringColumns, state + i, job.value_dim,
                                                     once ? known + i : nullptr);
    }
    for (; i + 8 <= count; i += 8) {
        recur_columns<1, kDelta>(job, head, first + i, 8, state + i, job.value_dim, once ? known + i : nullptr);
    }
    if (i == count) {
        return;
    }
    for (std::int64_t k = 0; k < job.key_dim; ++k) {
        store8(scratch + 8 * k, load8_some(state + k * job.value_dim + i, count - i));
    }
    recur_columns<1, kDelta>(job, head, first + i, count - i, scratch, 8, nullptr);
    for (std::int64_t k = 0; k < job.key_dim; ++k) {
        std::memcpy(state + k * job.value_dim + i, scratch + 8 * k, static_cast<std::size_t>(count - i) * 4);
    }
}

void recur(const RecurrenceJob& job, std::int64_t head, std::int64_t first, std::int64_t count, float* scratch) {
    if (job.rates == nullptr) {
        recur_some<false>(job, head, first, count, scratch);
    } else {
        recur_some<true>(job, head, first, count, scratch);
    }
}

void scan(const ScanJob& job) {
    for (std::int64_t token = 0; token < job.tokens; ++token) {
        const float *query = job.queries + token * job.queries_apart, *key = job.keys + token * job.keys_apart;
        const float *values = job.values + token * job.values_apart, *steps = job.steps + token * job.steps_apart;
        for (std::int64_t c = 0; c < job.count; ++c) {
            float* state = job.state + c * job.dim;
            const float* rates = job.rates + c * job.dim;
            const F8 step = set8(steps[c]), added = set8(steps[c] * values[c]);
            F8 sums = zero8();
            by_eights(job.dim, [&](auto load, auto store) {
                const F8 now = fma8(load(key), added, mul8(load(state), exp8(mul8(load(rates), step))));
                store(state, now);
                sums = fma8(now, load(query), sums);
            });
            job.out[token * job.out_apart + c] = sum8(sums) + job.skips[c] * values[c];
        }
    }
}
