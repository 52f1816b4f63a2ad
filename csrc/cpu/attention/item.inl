// An item: its rows over its tiles.

// What products are to be multiplied with.
inline float key_factor(const KvPages& pages, std::int64_t head) {
    return static_scale(pages.keys, head) * (pages.dtype == DType::kE4M3 ? kE4M3Factor : 1.0F);
}

inline void begin_rows(const AttentionJob& job, const AttentionItem& item, std::int64_t count, const Scratch& s) {
    const std::int64_t dim = job.kv.head_dim;
    std::memset(s.sums, 0, static_cast<std::size_t>(count * dim) * 4);
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t query = i / job.group, head = item.kv_head * job.group + i % job.group;
        s.rows[i] = {job.queries + (item.first_token + query) * job.query_token + head * job.query_head,
                     s.sums + i * dim,
                     s.weights + i * kKeyTile,
                     head,
                     item.first_position + query,
                     kNone,
                     0.0F,
                     1.0F,
                     0,
                     0};
    }
}

// All rows over the tile [first, end).
inline void attend_tile(const AttentionJob& job, const AttentionItem& item, std::int64_t first, std::int64_t end,
                        std::int64_t count, const Scratch& s) {
    const KvPages& pages = job.kv;
    const bool keys_here = in_place(job, pages.keys, count), values_here = in_place(job, pages.values, count);
    const float scale = job.scale * key_factor(pages, item.kv_head);
    Slots keys, values;
    Ahead next;
    const Ahead* ahead = nullptr;
    if (end < item.end_key && pages.keys.run == pages.head_dim && pages.values.run == pages.head_dim) {
        next = look_ahead(job, item, end);
        ahead = &next;
    }
    for (bool taken = false;;) {
        bool some = false;
        for (std::int64_t i = 0; i < count; ++i) {
            some |= look(job, item, first, end, s.rows[i]);
        }
        if (!some) {
            return;
        }
        if (!taken) {
            keys = take(job, item, pages.keys, first, item.first_key, end, keys_here, s.keys);
            values = take(job, item, pages.values, first, item.first_key, end, values_here, s.values);
            taken = true;
        }
        with_type(keys.type, [&](auto type) {
            each_alike(s.rows, count, [&](auto number, Row* rows) {
                weigh<decltype(type)::value, decltype(number)::value>(job, keys, values, scale, first, rows, ahead);
                ahead = nullptr;
            });
        });
        with_type(values.type, [&](auto type) {
            each_alike(s.rows, count, [&](auto number, Row* rows) {
                add_values<decltype(type)::value, decltype(number)::value>(values, pages.head_dim, rows);
            });
        });
        if (job.vert_stride <= 1) {
            return;
        }
    }
}

void attend(const AttentionJob& job, const AttentionItem& item, float* scratch) {
    const std::int64_t count = item.num_queries * job.group, dim = job.kv.head_dim;
    const Scratch s = split_scratch(job, count, scratch);
    begin_rows(job, item, count, s);
    for (std::int64_t first = item.first_key / kKeyTile * kKeyTile; first < item.end_key; first += kKeyTile) {
        const std::int64_t end = item.end_key < first + kKeyTile ? item.end_key : first + kKeyTile;
        for (std::int64_t i = 0; i < count; ++i) {
            s.rows[i].high = 0;
        }
        attend_tile(job, item, first, end, count, s);
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
