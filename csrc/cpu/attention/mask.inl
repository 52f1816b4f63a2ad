// Says which keys of a tile each row sees, and which rows see the same keys.

// Whether sparse attention lets a row see the block of `key`.
inline bool sees(const AttentionJob& job, const Row& row, std::int64_t kv_head, std::int64_t key) {
    const std::int64_t block = key / job.sparse_block;
    const std::int64_t offset = job.sparse_offset + row.head * job.sparse_head + kv_head * job.sparse_kv_head;
    return (block + offset) % job.vert_stride == 0 || block > row.position / job.sparse_block - job.local_blocks;
}

// The next keys of the tile [first, end) that a row sees, after row.high; none: false.
inline bool look(const AttentionJob& job, const AttentionItem& item, std::int64_t first, std::int64_t end, Row& row) {
    std::int64_t low = first + row.high > item.first_key ? first + row.high : item.first_key;
    std::int64_t high = row.position + 1 < end ? row.position + 1 : end;
    if (job.window > 0 && row.position - job.window + 1 > low) {
        low = row.position - job.window + 1;
    }
    if (job.vert_stride > 1) {
        const auto next_block = [&](std::int64_t key) {
            const std::int64_t next = (key / job.sparse_block + 1) * job.sparse_block;
            return next < high ? next : high;
        };
        while (low < high && !sees(job, row, item.kv_head, low)) {
            low = next_block(low);
        }
        std::int64_t stop = low;
        while (stop < high && sees(job, row, item.kv_head, stop)) {
            stop = next_block(stop);
        }
        high = stop;
    }
    const bool some = low < high;
    row.low = static_cast<std::int32_t>(some ? low - first : kKeyTile);
    row.high = static_cast<std::int32_t>(some ? high - first : kKeyTile);
    return some;
}

// How many of `count` rows, the first one included, look at the same keys: up to kMostRows.
inline int alike(const Row* rows, std::int64_t count) {
    int same = 1;
    while (same < kMostRows && same < count && rows[same].low == rows[0].low && rows[same].high == rows[0].high) {
        ++same;
    }
    return same;
}

template <typename Do>
inline void with_count(int count, const Do& run) {
    switch (count) {
        case 1:
            return run(std::integral_constant<int, 1>());
        case 2:
            return run(std::integral_constant<int, 2>());
        case 3:
            return run(std::integral_constant<int, 3>());
        default:
            return run(std::integral_constant<int, 4>());
    }
}

// Calls run(integral_constant of the number, rows) for rows that look at the same keys, until all have been.
template <typename Do>
inline void each_alike(Row* rows, std::int64_t count, const Do& run) {
    for (std::int64_t r = 0; r < count;) {
        const int same = alike(rows + r, count - r);
        if (rows[r].low < rows[r].high) {
            with_count(same, [&](auto number) { run(number, rows + r); });
        }
        r += same;
    }
}
