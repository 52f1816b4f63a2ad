// Says which keys of a tile each row sees.

// Whether sparse attention lets a row see the block of `key`.
inline bool sees(const AttentionJob& job, const Row& row, std::int64_t kv_head, std::int64_t key) {
    const std::int64_t block = key / job.sparse_block;
    const std::int64_t offset = job.sparse_offset + row.head * job.sparse_head + kv_head * job.sparse_kv_head;
    return (block + offset) % job.vert_stride == 0 || block > row.position / job.sparse_block - job.local_blocks;
}

// Bits [low, high).
inline KeyBits bits_between(std::int64_t low, std::int64_t high) {
    return low < high ? ~KeyBits{0} >> (kKeyTile - (high - low)) << low : 0;
}

inline KeyBits seen_keys(const AttentionJob& job, const AttentionItem& item, std::int64_t first, std::int64_t tile,
                         const Row& row) {
    const bool all = job.both_ways || row.position + 1 >= item.end_key;
    const std::int64_t after = all ? item.end_key : row.position + 1;
    const std::int64_t high = after < first + tile ? after : first + tile;
    std::int64_t low = first > item.first_key ? first : item.first_key;
    if (job.window > 0 && row.position - job.window + 1 > low) {
        low = row.position - job.window + 1;
    }
    if (job.vert_stride <= 1) {
        return bits_between(low - first, high - first);
    }
    KeyBits seen = 0;
    while (low < high) {
        const std::int64_t next = (low / job.sparse_block + 1) * job.sparse_block, end = next < high ? next : high;
        seen |= sees(job, row, item.kv_head, low) ? bits_between(low - first, end - first) : 0;
        low = end;
    }
    return seen;
}

// Whether all rows see all keys of the tile that begins at position `first`.
inline bool all_see_tile(const AttentionJob& job, const AttentionItem& item, std::int64_t first, std::int64_t tile) {
    return job.window == 0 && job.vert_stride <= 1 && first >= item.first_key && first + tile <= item.end_key &&
           (job.both_ways || first + tile <= item.first_position + 1);
}

// What each row sees of that tile, and what any row does.
inline KeyBits look(const AttentionJob& job, const AttentionItem& item, std::int64_t first, std::int64_t tile,
                    std::int64_t count, Row* rows) {
    KeyBits any = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        rows[i].seen = seen_keys(job, item, first, tile, rows[i]);
        any |= rows[i].seen;
    }
    return any;
}

inline bool all_see(const Row* rows, std::int64_t count, KeyBits keys) {
    bool all = true;
    for (std::int64_t i = 0; i < count; ++i) {
        all = all && rows[i].seen == keys;
    }
    return all;
}

inline bool any_sees(const Row* rows, std::int64_t count) {
    KeyBits any = 0;
    for (std::int64_t i = 0; i < count; ++i) {
        any |= rows[i].seen;
    }
    return any != 0;
}
