// Attention of some queries to pages. A tile of keys is taken once for all rows (queries x heads of the group); tiles
// lie at fixed positions and a row sees them in order, so that its bits do not depend on what runs beside it: rows are
// computed up to four together, each with the operations it would have alone.

constexpr std::int64_t kKeyTile = 32;
constexpr std::int64_t kGroups = kKeyTile / 8;
constexpr int kMostRows = 4;  // computed together
constexpr float kNone = -std::numeric_limits<float>::infinity();

#if defined(__AVX512VL__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

// Eight elements as the kernels take them: e4m3 divided by kE4M3Factor, int8 without its scale.
template <DType kType>
inline F8 load8_as(const char* p) {
    if constexpr (kType == DType::kF32) {
        return load8(reinterpret_cast<const float*>(p));
    } else if constexpr (kType == DType::kF16) {
        return load8_f16(reinterpret_cast<const std::uint16_t*>(p));
    } else if constexpr (kType == DType::kBF16) {
        return load8_bf16(reinterpret_cast<const std::uint16_t*>(p));
    } else if constexpr (kType == DType::kE4M3) {
        return load8_e4m3(p);
    } else if constexpr (kType == DType::kE5M2) {
        return load8_e5m2(p);
    } else {
        return load8_i8(p);
    }
}

template <DType kType>
constexpr std::int64_t kSize = kType == DType::kF32                            ? 4
                               : kType == DType::kF16 || kType == DType::kBF16 ? 2
                                                                               : 1;

// One query of one head, and what is known of it so far.
struct Row {
    const float* query;
    float* sums;     // [dim]
    float* weights;  // [kKeyTile]
    std::int64_t head, position;
    float maximum, total, rescale;
    std::int32_t low, high;  // which keys of the tile it looks at now
};

// Keys or values of a tile, eight slots at a time.
struct Slots {
    const char* at[kGroups];
    const char* scales[kGroups];  // float16 [8]; null: none
    std::int64_t stride;          // from one slot to the next, in bytes
    DType type;
};

// ---- scratch

struct Scratch {
    Row* rows;
    float* sums;     // [rows, dim]
    float* weights;  // [rows, kKeyTile]
    float* keys;     // [kKeyTile, dim], where they are not taken from where they lie
    float* values;
};

std::int64_t attend_scratch(const AttentionJob& job, std::int64_t num_queries) {
    const std::int64_t rows = num_queries * job.group, dim = job.kv.head_dim;
    return rows * (dim + kKeyTile + static_cast<std::int64_t>(sizeof(Row) / 4)) + 2 * kKeyTile * dim;
}

inline Scratch split_scratch(const AttentionJob& job, std::int64_t rows, float* p) {
    const std::int64_t dim = job.kv.head_dim;
    Scratch s;
    s.keys = p;
    s.values = s.keys + kKeyTile * dim;
    s.sums = s.values + kKeyTile * dim;
    s.weights = s.sums + rows * dim;
    s.rows = reinterpret_cast<Row*>(s.weights + rows * kKeyTile);
    return s;
}

// ---- keys and values

template <DType kType>
inline void widen_rows(const KvPages& pages, const KvSide& side, const char* from, float* to) {
    for (std::int64_t slot = 0; slot < 8; ++slot, from += side.slot * kSize<kType>) {
        for (std::int64_t d = 0; d < pages.head_dim; d += 8) {
            store8(to + slot * pages.head_dim + d, load8_as<kType>(from + d * kSize<kType>));
        }
    }
}

// Elements that lie in runs shorter than a row: runs of 4 (or more) dimensions, or of slots (run == 1).
template <DType kType>
inline void widen_runs(const KvPages& pages, const KvSide& side, const char* from, float* to) {
    const std::int64_t dim = pages.head_dim;
    float eight[8];
    if (side.run == 1) {
        for (std::int64_t d = 0; d < dim; ++d, from += side.outer * kSize<kType>) {
            store8(eight, load8_as<kType>(from));
            for (std::int64_t slot = 0; slot < 8; ++slot) {
                to[slot * dim + d] = eight[slot];
            }
        }
        return;
    }
    // The runs of eight slots follow each other.
    for (std::int64_t d = 0; d < dim; d += side.run, from += side.outer * kSize<kType>) {
        for (std::int64_t i = 0; i < 8 * side.run; i += 8) {
            store8(eight, load8_as<kType>(from + i * kSize<kType>));
            for (std::int64_t k = 0; k < 8; ++k) {
                to[(i + k) / side.run * dim + d + (i + k) % side.run] = eight[k];
            }
        }
    }
}

template <DType kType>
inline void widen(const KvPages& pages, const KvSide& side, const char* from, float* to) {
    side.run == pages.head_dim ? widen_rows<kType>(pages, side, from, to) : widen_runs<kType>(pages, side, from, to);
}

template <typename Do>
inline void with_type(DType type, const Do& run) {
    switch (type) {
        case DType::kF32:
            return run(std::integral_constant<DType, DType::kF32>());
        case DType::kF16:
            return run(std::integral_constant<DType, DType::kF16>());
        case DType::kBF16:
            return run(std::integral_constant<DType, DType::kBF16>());
        case DType::kE4M3:
            return run(std::integral_constant<DType, DType::kE4M3>());
        case DType::kE5M2:
            return run(std::integral_constant<DType, DType::kE5M2>());
        default:
            return run(std::integral_constant<DType, DType::kI8>());
    }
}

// Whether rows are taken from where they lie: not if they are scattered, nor if widening them is done once for many.
inline bool in_place(const AttentionJob& job, const KvSide& side, std::int64_t rows) {
    return side.run == job.kv.head_dim && (job.kv.dtype == DType::kF32 || rows <= kMostRows);
}

// The slots [first, end) of a sequence; groups of eight before `from` are not looked at, nor are their blocks.
inline Slots take(const AttentionJob& job, const AttentionItem& item, const KvSide& side, std::int64_t first,
                  std::int64_t from, std::int64_t end, bool here, float* space) {
    const KvPages& pages = job.kv;
    Slots slots{};
    slots.type = here ? pages.dtype : DType::kF32;
    slots.stride = here ? side.slot * size_in_cache(pages.dtype) : pages.head_dim * 4;
    for (std::int64_t i = 0; i < kGroups; ++i) {
        const std::int64_t position = first + 8 * i;
        if (position >= end) {
            break;
        }
        if (position + 8 <= from) {
            continue;
        }
        const std::int64_t block = item.table[position / pages.block_size], slot = position % pages.block_size;
        const char* place = slot_place(pages, side, block, item.kv_head, slot);
        slots.scales[i] = side.slot_scales ? slot_scale(side, block, item.kv_head, slot) : nullptr;
        slots.at[i] = place;
        if (!here) {
            float* to = space + 8 * i * pages.head_dim;
            with_type(pages.dtype, [&](auto type) { widen<decltype(type)::value>(pages, side, place, to); });
            slots.at[i] = reinterpret_cast<const char*>(to);
        }
    }
    return slots;
}

// The tile after this one, asked for while this one is worked on: pages end the hardware's guesses.
struct Ahead {
    Slots keys, values;
};

__attribute__((always_inline)) inline void fetch_slots(const AttentionJob& job, const Slots& slots,
                                                       std::int64_t group) {
    const char* at = slots.at[group];
    if (at == nullptr) {
        return;
    }
    const std::int64_t bytes = job.kv.head_dim * size_in_cache(job.kv.dtype);
    if (slots.stride == bytes) {
        for (std::int64_t i = 0; i < 8 * bytes; i += 64) {
            fetch_second(at + i);
        }
        return;
    }
    for (std::int64_t slot = 0; slot < 8; ++slot) {
        for (std::int64_t i = 0; i < bytes; i += 64) {
            fetch_second(at + slot * slots.stride + i);
        }
    }
}

// ---- scores

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

// ---- values

// 8 kWide dimensions of sums += weight * value.
template <DType kType, int kCount, int kWide>
inline void add_some(const Slots& values, Row* rows, std::int64_t d) {
    F8 sums[kCount][kWide];
    for (int r = 0; r < kCount; ++r) {
        for (int i = 0; i < kWide; ++i) {
            sums[r][i] = mul8(load8(rows[r].sums + d + 8 * i), set8(rows[r].rescale));
        }
    }
    for (std::int64_t j = rows[0].low; j < rows[0].high; ++j) {
        const char* value = values.at[j / 8] + j % 8 * values.stride + d * kSize<kType>;
        F8 weights[kCount];
        for (int r = 0; r < kCount; ++r) {
            weights[r] = set8(rows[r].weights[j]);
        }
        for (int i = 0; i < kWide; ++i) {
            const F8 x = load8_as<kType>(value + 8 * i * kSize<kType>);
            for (int r = 0; r < kCount; ++r) {
                sums[r][i] = fma8(weights[r], x, sums[r][i]);
            }
        }
    }
    for (int r = 0; r < kCount; ++r) {
        for (int i = 0; i < kWide; ++i) {
            store8(rows[r].sums + d + 8 * i, sums[r][i]);
        }
    }
}

template <DType kType, int kCount>
inline void add_values(const Slots& values, std::int64_t dim, Row* rows) {
    constexpr int kWide = kCount == 1 ? 8 : kCount <= 3 || kManyRegisters ? 4 : 2;
    std::int64_t d = 0;
    for (; d + 8 * kWide <= dim; d += 8 * kWide) {
        add_some<kType, kCount, kWide>(values, rows, d);
    }
    for (; d < dim; d += 8) {
        add_some<kType, kCount, 1>(values, rows, d);
    }
}

// ---- items

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

// What products are to be multiplied with, and sums.
inline float key_factor(const KvPages& pages, std::int64_t head) {
    return static_scale(pages.keys, head) * (pages.dtype == DType::kE4M3 ? kE4M3Factor : 1.0F);
}
inline float value_factor(const KvPages& pages, std::int64_t head) {
    return static_scale(pages.values, head) * (pages.dtype == DType::kE4M3 ? kE4M3Factor : 1.0F);
}

inline void finish_row(const AttentionJob& job, std::int64_t head, float maximum, float total, const float* sums,
                       float* out) {
    if (job.sinks) {
        total += std::exp(job.sinks[head] - maximum);
    }
    const float factor = total == 0.0F ? 0.0F : value_factor(job.kv, head / job.group) / total;
    for (std::int64_t d = 0; d < job.kv.head_dim; d += 8) {
        store8(out + d, mul8(load8(sums + d), set8(factor)));
    }
}

inline float* out_row(const AttentionJob& job, const AttentionItem& item, std::int64_t row) {
    const std::int64_t head = item.kv_head * job.group + row % job.group;
    return job.out + (item.first_token + row / job.group) * job.out_token + head * job.out_head;
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

inline Ahead look_ahead(const AttentionJob& job, const AttentionItem& item, std::int64_t first) {
    const std::int64_t end = item.end_key < first + kKeyTile ? item.end_key : first + kKeyTile;
    const KvPages& pages = job.kv;
    return {take(job, item, pages.keys, first, item.first_key, end, true, nullptr),
            take(job, item, pages.values, first, item.first_key, end, true, nullptr)};
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

// Puts the parts of an item together, in order; the first one's memory is used up.
void merge(const AttentionJob& job, const AttentionItem& item, std::int64_t num_parts, std::int64_t part_floats) {
    const std::int64_t rows = item.num_queries * job.group, dim = job.kv.head_dim;
    for (std::int64_t row = 0; row < rows; ++row) {
        float* sums = item.partial + row * (dim + 2);
        for (std::int64_t part = 1; part < num_parts; ++part) {
            const float* more = sums + part * part_floats;
            const float next = more[dim] > sums[dim] ? more[dim] : sums[dim];
            if (next == kNone) {
                continue;
            }
            const float mine = std::exp(sums[dim] - next), theirs = std::exp(more[dim] - next);
            for (std::int64_t d = 0; d < dim; d += 8) {
                const F8 kept = mul8(load8(sums + d), set8(mine));
                store8(sums + d, fma8(load8(more + d), set8(theirs), kept));
            }
            sums[dim] = next;
            sums[dim + 1] = sums[dim + 1] * mine + more[dim + 1] * theirs;
        }
        const std::int64_t head = item.kv_head * job.group + row % job.group;
        finish_row(job, head, sums[dim], sums[dim + 1], sums, out_row(job, item, row));
    }
}
