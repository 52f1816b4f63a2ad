// Computes one item of a plan: its rows against its tiles of keys.

inline void begin_rows(const AttentionJob& job, const AttentionItem& item, std::int64_t count, const Scratch& s) {
    const std::int64_t dim = job.kv.head_dim;
    const F8 factor = set8(query_factor(job, item.kv_head));
    std::memset(s.sums, 0, static_cast<std::size_t>(count * dim) * 4);
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t query = i / job.group, head = item.kv_head * job.group + i % job.group;
        const float* from = job.queries + (item.first_token + query) * job.query_token + head * job.query_head;
        float* scaled = s.queries + i * dim;
        for (std::int64_t d = 0; d < dim; d += 8) {
            store8(scaled + d, mul8(load8(from + d), factor));
        }
        s.rows[i] = {
            scaled, s.sums + i * dim, s.weights + i * kKeyTile, head, item.first_position + query, kNone, 0.0F, 1.0F, 0,
            0};
    }
}

// Whether rows take keys and values from where they lie, and ask for the next tile while they read this one. Widening
// is worth its while for more rows than are computed together, turning alone for four times as many.
inline bool few(const AttentionJob& job, std::int64_t rows) {
    return rows <= (job.kv.dtype == DType::kF32 ? 4 * kMostRows : kMostRows);
}

// For many rows values are widened once, and keys turned as well, so that nothing is summed across a register.
inline Form form_of(const AttentionJob& job, const KvSide& side, bool keys, std::int64_t rows) {
    if (side.run == job.kv.head_dim && (few(job, rows) || (!keys && job.kv.dtype == DType::kF32))) {
        return Form::kInPlace;
    }
    return keys ? Form::kColumns : Form::kRows;
}

// Weights of all rows. Many rows ask for the next tile here, a group each; few do it where they read this one.
inline void weigh_rows(const AttentionJob& job, const Slots& keys, const Slots& values, std::int64_t first,
                       std::int64_t count, Row* all) {
    if (keys.form == Form::kInPlace) {
        return with_type(keys.type, [&](auto type) {
            each_alike(all, count, [&](auto number, Row* rows) {
                weigh<decltype(type)::value, false, decltype(number)::value>(job, keys, values, first, rows);
            });
        });
    }
    const bool together = job.kv.keys.run == job.kv.head_dim && job.kv.values.run == job.kv.head_dim;
    std::int64_t group = together ? 0 : kGroups;
    each_alike(all, count, [&](auto number, Row* rows) {
        if (group < kGroups && keys.ahead[group]) {
            fetch_group(job, job.kv.keys, keys.ahead[group]);
            fetch_group(job, job.kv.values, values.ahead[group]);
        }
        ++group;
        weigh<DType::kF32, true, decltype(number)::value>(job, keys, values, first, rows);
    });
}

inline void add_value_rows(const AttentionJob& job, const Slots& values, std::int64_t count, Row* all) {
    const std::int64_t dim = job.kv.head_dim;
    if (values.form == Form::kInPlace && few(job, count)) {
        return with_type(values.type, [&](auto type) {
            each_alike(all, count, [&](auto number, Row* rows) {
                add_values<decltype(type)::value, true, decltype(number)::value>(values, dim, rows);
            });
        });
    }
    each_alike(all, count, [&](auto number, Row* rows) {
        add_values<DType::kF32, false, decltype(number)::value>(values, dim, rows);
    });
}

inline bool look_all(const AttentionJob& job, const AttentionItem& item, std::int64_t first, std::int64_t end,
                     std::int64_t count, Row* rows) {
    bool some = false;
    for (std::int64_t i = 0; i < count; ++i) {
        some |= look(job, item, first, end, rows[i]);
    }
    return some;
}

void attend(const AttentionJob& job, const AttentionItem& item, float* scratch) {
    const KvPages& pages = job.kv;
    const std::int64_t count = item.num_queries * job.group, dim = pages.head_dim;
    Scratch s = split_scratch(job, count, scratch);
    begin_rows(job, item, count, s);
    const Form key_form = form_of(job, pages.keys, true, count), value_form = form_of(job, pages.values, false, count);
    Walk walk = walk_from(job, item, item.first_key / 8 * 8);
    std::int64_t first = item.first_key / kKeyTile * kKeyTile;
    Places next_keys{}, next_values{};
    locate(job, item, first, walk, next_keys, next_values);
    for (; first < item.end_key; first += kKeyTile) {
        const Places here_keys = next_keys, here_values = next_values;
        locate(job, item, first + kKeyTile, walk, next_keys, next_values);
        const std::int64_t end = item.end_key < first + kKeyTile ? item.end_key : first + kKeyTile;
        const std::int64_t low = item.first_key > first ? item.first_key - first : 0;
        for (std::int64_t i = 0; i < count; ++i) {
            s.rows[i].high = 0;
        }
        if (!look_all(job, item, first, end, count, s.rows)) {
            continue;
        }
        const Slots keys = take(job, pages.keys, key_form, here_keys, next_keys, low, end - first, s.eight, s.keys);
        const Slots values =
            take(job, pages.values, value_form, here_values, next_values, low, end - first, s.eight, s.values);
        do {
            weigh_rows(job, keys, values, first, count, s.rows);
            add_value_rows(job, values, count, s.rows);
        } while (job.vert_stride > 1 && look_all(job, item, first, end, count, s.rows));
    }
    for (std::int64_t i = 0; i < count; ++i) {
        const Row& row = s.rows[i];
        if (item.partial) {
            float* partial = item.partial + i * (dim + 2);
            std::memcpy(partial, row.sums, static_cast<std::size_t>(dim) * 4);
            partial[dim] = row.maximum;
            partial[dim + 1] = row.total;
        } else {
            finish_row(job, row.head, row.maximum, row.total, row.sums, out_row(job, item, i));
        }
    }
}
