// Attention of a tile of queries to pages. A tile of keys is taken once for all rows (queries x heads of the group);
// tiles lie at fixed positions and a row sees them in order, so that its bits do not depend on what runs beside it.

constexpr std::int64_t kKeyTile = 32;

struct Scratch {
    float* sums;     // [rows, dim]
    float* weights;  // [rows, kKeyTile]
    float* maxima;   // [rows]
    float* totals;   // [rows]
    float* keys;     // [kKeyTile, dim], where keys are not float32
    float* values;
};

std::int64_t attend_scratch(const AttentionJob& job, std::int64_t num_queries) {
    const std::int64_t rows = num_queries * job.group;
    return rows * (job.head_dim + kKeyTile + 2) + 2 * kKeyTile * job.head_dim + 64;
}

inline Scratch split_scratch(const AttentionJob& job, std::int64_t rows, float* p) {
    Scratch s;
    s.sums = p;
    s.weights = s.sums + rows * job.head_dim;
    s.keys = s.weights + rows * kKeyTile;
    s.values = s.keys + kKeyTile * job.head_dim;
    s.maxima = s.values + kKeyTile * job.head_dim;
    s.totals = s.maxima + rows;
    return s;
}

// Eight keys at a time: where they are, as float32.
struct Tile {
    const float* keys[kKeyTile / 8];
    const float* values[kKeyTile / 8];
    std::int64_t stride;
};

inline Tile take_tile(const AttentionJob& job, const AttentionItem& item, std::int64_t first, std::int64_t end,
                      const Scratch& s) {
    Tile tile;
    tile.stride = job.kv_dtype == DType::kF32 ? job.kv_slot : job.head_dim;
    for (std::int64_t i = 0; i < kKeyTile / 8; ++i) {
        const std::int64_t position = first + 8 * i;
        if (position >= end) {
            break;
        }
        const std::int64_t block = item.table[position / job.block_size];
        const std::int64_t offset =
            block * job.kv_block + item.kv_head * job.kv_head + position % job.block_size * job.kv_slot;
        if (job.kv_dtype == DType::kF32) {
            tile.keys[i] = static_cast<const float*>(job.kv) + offset;
            tile.values[i] = tile.keys[i] + job.kv_value;
            continue;
        }
        const auto* half = static_cast<const std::uint16_t*>(job.kv) + offset;
        float* keys = s.keys + 8 * i * job.head_dim;
        float* values = s.values + 8 * i * job.head_dim;
        for (std::int64_t j = 0; j < 8; ++j) {
            to_float(job.kv_dtype, half + j * job.kv_slot, job.head_dim, keys + j * job.head_dim);
            to_float(job.kv_dtype, half + job.kv_value + j * job.kv_slot, job.head_dim, values + j * job.head_dim);
        }
        tile.keys[i] = keys;
        tile.values[i] = values;
    }
    return tile;
}

inline F8 dot_keys(const float* query, const float* keys, std::int64_t stride, std::int64_t dim) {
    F8 sums[8];
    for (int j = 0; j < 8; ++j) {
        sums[j] = zero8();
    }
    for (std::int64_t d = 0; d < dim; d += 8) {
        const F8 q = load8(query + d);
        for (int j = 0; j < 8; ++j) {
            sums[j] = fma8(load8(keys + j * stride + d), q, sums[j]);
        }
    }
    return sums8(sums);
}

// tanh(x) = 1 - 2 / (e^2x + 1)
inline F8 tanh8(F8 x) {
    const F8 e = exp8(mul8(x, set8(2.0F)));
    return sub8(set8(1.0F), div8(set8(2.0F), add8(e, set8(1.0F))));
}

// kWidth x 8 dimensions of sums += weights[j] * values[j] for the keys [first, end) of a tile.
template <int kWidth>
inline void add_values(const Tile& tile, const float* weights, std::int64_t first, std::int64_t end, std::int64_t d,
                       F8 rescale, float* sums) {
    F8 acc[kWidth];
    for (int i = 0; i < kWidth; ++i) {
        acc[i] = mul8(load8(sums + d + 8 * i), rescale);
    }
    for (std::int64_t j = first; j < end; ++j) {
        const float* value = tile.values[j / 8] + j % 8 * tile.stride + d;
        const F8 weight = set8(weights[j]);
        for (int i = 0; i < kWidth; ++i) {
            acc[i] = fma8(weight, load8(value + 8 * i), acc[i]);
        }
    }
    for (int i = 0; i < kWidth; ++i) {
        store8(sums + d + 8 * i, acc[i]);
    }
}

// A row's scores of the keys [low, high) of a tile (of first position `first`): their exponentials go to `weights`.
// Returns what the row's sums are to be multiplied with.
inline float weigh(const AttentionJob& job, const Tile& tile, const float* query, std::int64_t head,
                   std::int64_t position, std::int64_t first, std::int64_t low, std::int64_t high, float* weights,
                   float& maximum, float& total) {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    F8 tops = set8(kNone);
    for (std::int64_t j = low / 8 * 8; j < high; j += 8) {
        F8 scores = mul8(dot_keys(query, tile.keys[j / 8], tile.stride, job.head_dim), set8(job.scale));
        if (job.soft_cap > 0) {
            scores = mul8(tanh8(div8(scores, set8(job.soft_cap))), set8(job.soft_cap));
        }
        if (job.alibi) {
            constexpr float kSteps[8] = {0, 1, 2, 3, 4, 5, 6, 7};
            const F8 distance = add8(set8(static_cast<float>(first + j - position)), load8(kSteps));
            scores = fma8(set8(job.alibi[head]), distance, scores);
        }
        store8(weights + j, scores);
        if (j < low || j + 8 > high) {  // what is outside may be anything
            for (std::int64_t k = j; k < j + 8; ++k) {
                weights[k] = k < low || k >= high ? kNone : weights[k];
            }
        }
        tops = max8(tops, load8(weights + j));
    }
    const float top = top8(tops);
    const float next = top > maximum ? top : maximum;
    const float rescale = maximum == kNone ? 0.0F : std::exp(maximum - next);
    F8 sums = zero8();
    for (std::int64_t j = low / 8 * 8; j < high; j += 8) {
        const F8 scores = load8(weights + j);
        const F8 e = exp8(sub8(scores, set8(next)));
        store8(weights + j, e);
        if (j < low || j + 8 > high) {
            for (std::int64_t k = j; k < j + 8; ++k) {
                weights[k] = k < low || k >= high ? 0.0F : weights[k];
            }
        }
        sums = add8(sums, load8(weights + j));
    }
    total = total * rescale + sum8(sums);
    maximum = next;
    return rescale;
}

inline void finish_row(const AttentionJob& job, std::int64_t head, float maximum, float total, const float* sums,
                       float* out) {
    if (job.sinks) {
        total += std::exp(job.sinks[head] - maximum);
    }
    const F8 inverse = set8(1.0F / total);
    for (std::int64_t d = 0; d < job.head_dim; d += 8) {
        store8(out + d, mul8(load8(sums + d), inverse));
    }
}

void attend(const AttentionJob& job, const AttentionItem& item, float* scratch) {
    const std::int64_t rows = item.num_queries * job.group, dim = job.head_dim;
    const Scratch s = split_scratch(job, rows, scratch);
    std::memset(s.sums, 0, static_cast<std::size_t>(rows * dim) * 4);
    for (std::int64_t row = 0; row < rows; ++row) {
        s.maxima[row] = -std::numeric_limits<float>::infinity();
        s.totals[row] = 0;
    }
    for (std::int64_t first = item.first_key / kKeyTile * kKeyTile; first < item.end_key; first += kKeyTile) {
        const std::int64_t end = item.end_key < first + kKeyTile ? item.end_key : first + kKeyTile;
        // Tiles begin at fixed places, items at blocks: what lies before this item's first key is not looked at.
        std::int64_t start = first;
        while (start + 8 <= item.first_key) {
            start += 8;
        }
        Tile tile = take_tile(job, item, start, end, s);
        if (start > first) {
            const std::int64_t skipped = (start - first) / 8;
            for (std::int64_t i = kKeyTile / 8 - 1; i >= skipped; --i) {
                tile.keys[i] = tile.keys[i - skipped];
                tile.values[i] = tile.values[i - skipped];
            }
        }
        for (std::int64_t row = 0; row < rows; ++row) {
            const std::int64_t query = row / job.group, head = item.kv_head * job.group + row % job.group;
            const std::int64_t position = item.first_position + query;
            std::int64_t low = item.first_key > first ? item.first_key - first : 0;
            if (job.window > 0 && position - job.window + 1 - first > low) {
                low = position - job.window + 1 - first;
            }
            const std::int64_t high = (position + 1 < end ? position + 1 : end) - first;
            if (low >= high) {
                continue;
            }
            float* weights = s.weights + row * kKeyTile;
            const float* q = job.queries + (item.first_token + query) * job.query_token + head * job.query_head;
            const F8 rescale =
                set8(weigh(job, tile, q, head, position, first, low, high, weights, s.maxima[row], s.totals[row]));
            float* sums = s.sums + row * dim;
            std::int64_t d = 0;
            for (; d + 64 <= dim; d += 64) {
                add_values<8>(tile, weights, low, high, d, rescale, sums);
            }
            for (; d < dim; d += 8) {
                add_values<1>(tile, weights, low, high, d, rescale, sums);
            }
        }
    }
    for (std::int64_t row = 0; row < rows; ++row) {
        const std::int64_t query = row / job.group, head = item.kv_head * job.group + row % job.group;
        const float* sums = s.sums + row * dim;
        if (item.partial) {
            float* partial = item.partial + row * (dim + 2);
            std::memcpy(partial, sums, static_cast<std::size_t>(dim) * 4);
            partial[dim] = s.maxima[row];
            partial[dim + 1] = s.totals[row];
        } else {
            float* out = job.out + (item.first_token + query) * job.out_token + head * job.out_head;
            finish_row(job, head, s.maxima[row], s.totals[row], sums, out);
        }
    }
}

// Puts the parts of an item together, in order; the first one's memory is used up.
void merge(const AttentionJob& job, const AttentionItem& item, std::int64_t num_parts, std::int64_t part_floats) {
    const std::int64_t rows = item.num_queries * job.group, dim = job.head_dim;
    for (std::int64_t row = 0; row < rows; ++row) {
        float* sums = item.partial + row * (dim + 2);
        for (std::int64_t part = 1; part < num_parts; ++part) {
            const float* more = sums + part * part_floats;
            const float next = more[dim] > sums[dim] ? more[dim] : sums[dim];
            if (next == -std::numeric_limits<float>::infinity()) {
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
        const std::int64_t query = row / job.group, head = item.kv_head * job.group + row % job.group;
        float* out = job.out + (item.first_token + query) * job.out_token + head * job.out_head;
        finish_row(job, head, sums[dim], sums[dim + 1], sums, out);
    }
}
