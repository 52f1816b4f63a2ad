// Computes one item of a plan: its rows against its tiles of keys.

template <typename Form>
inline void begin_rows(const AttentionJob& job, const AttentionItem& item, std::int64_t count, Scratch<Form>& s) {
    const std::int64_t dim = job.kv.head_dim, rows = round_up(count, Form::kRowStep);
    constexpr std::size_t kBytes = sizeof(typename Form::Number);
    std::memset(s.sums, 0, static_cast<std::size_t>(rows * s.dim) * 4);
    std::memset(s.totals, 0, static_cast<std::size_t>(rows * Lanes::kCount) * 4);
    std::memset(s.queries, 0, static_cast<std::size_t>(rows * s.dim) * kBytes);
    std::memset(s.weights, 0, static_cast<std::size_t>(kSides * kMostBlock * kKeyTile) * kBytes);
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t query = i / job.group, head = item.kv_head * job.group + i % job.group;
        const float* from = job.queries + (item.first_token + query) * job.query_token + head * job.query_head;
        Form::put_query(from, dim, s.queries + i * s.dim);
        s.rows[i] = {head, item.first_position + query, 0};
        s.maxima[i] = kNone;
    }
}

// The values of a slot, as the rows' weights are multiplied with.
inline void widen_values(const KvPages& pages, const Slots& slots, std::int64_t key, float* to) {
    with_type(pages.dtype, [&](auto type) {
        constexpr DType kType = decltype(type)::value;
        for (std::int64_t d = 0; d < pages.head_dim; d += 8) {
            store8(to + d, load8_as<kType>(slots.at(key) + d * kSize<kType>));
        }
    });
}

inline bool is_finite(float x) { return fabsf(x) < kInfinity; }

// Zero times a value that is not finite is no zero. So these become zeros, and are added to the rows that see them.
template <typename Form>
inline void clear_broken(Range range, Scratch<Form>& s) {
    for (std::int64_t i = range.from * s.dim; i < range.end * s.dim; ++i) {
        s.values[i] = is_finite(Form::value(s.values[i])) ? s.values[i] : typename Form::Number{0};
    }
}

// For `count` rows from `row` on, which are a block.
template <typename Form>
inline void add_broken(const KvPages& pages, const Slots& slots, std::int64_t row, std::int64_t count,
                       const typename Form::Number* weights, Scratch<Form>& s) {
    float values[kMostHeadDim];
    for (std::int64_t key = 0; key < s.tile; ++key) {
        widen_values(pages, slots, key, values);
        for (std::int64_t d = 0; d < pages.head_dim; ++d) {
            for (std::int64_t i = 0; i < count && !is_finite(values[d]); ++i) {
                const float weight = Form::value(weights[i * kKeyTile + key]);
                s.sums[(row + i) * s.dim + d] +=
                    (s.whole || (s.rows[row + i].seen >> key & 1) != 0) ? weight * values[d] : 0.0F;
            }
        }
    }
}

// Rows against the keys of a tile that `any` of them sees.
template <typename Form>
void attend_tile(const AttentionJob& job, float factor, std::int64_t first, std::int64_t count, KeyBits any,
                 const Places& key_places, const Places& value_places, Form& form, Scratch<Form>& s, Ahead& ahead) {
    using Number = typename Form::Number;
    const KvPages& pages = job.kv;
    const std::int64_t low = __builtin_ctz(any), high = kKeyTile - __builtin_clz(any);
    const Range range{low / Form::kKeyStep * Form::kKeyStep, round_up(high, Form::kKeyStep)};
    const std::int64_t size = range.end - range.from;
    Slots key_slots, value_slots;
    take(pages, pages.keys, key_places, any, s.room, key_slots);
    const auto block_at = [&](std::int64_t row) {
        return count - row < Form::kBlockRows ? count - row : Form::kBlockRows;
    };
    const bool turned = count <= Form::most_turned(pages);
    if (!turned) {
        Form::pack_keys(pages, key_slots, range, s, ahead);
    }
    // `side`: where a block's scores and weights are.
    const auto score = [&](std::int64_t row, std::int64_t side) {
        const Number* keys = s.keys + range.from * Form::kPair;
        Factors<Number> f{s.queries + row * s.dim,
                          s.dim,
                          keys,
                          kKeyTile * Form::kPair,
                          pages.head_dim,
                          s.scores + side + range.from,
                          kKeyTile,
                          block_at(row),
                          size,
                          false};
        if constexpr (Form::kInPlace) {
            if (turned) {
                f.out = s.scores;
                return Form::multiply_keys(pages, key_slots, range, f, ahead);
            }
        }
        form.multiply(f, ahead);
    };
    const auto next_block = [&](std::int64_t row) {  // the first one from there on that sees a key
        while (row < count && !s.whole && !any_sees(s.rows + row, block_at(row))) {
            row += Form::kBlockRows;
        }
        return row;
    };
    const std::int64_t begin = next_block(0);
    score(begin, 0);
    take(pages, pages.values, value_places, any, s.room, value_slots);
    // Rows that all see the same keys add no value of another key.
    const bool fits = count <= Form::most_in_place(pages) && pages.head_dim % Form::kDimStep == 0;
    const bool in_place = fits && (s.whole || all_see(s.rows, count, any));
    const bool broken = !in_place && !Form::pack_values(pages, value_slots, range, s, ahead);
    if (broken) {
        clear_broken(range, s);
    }
    const Number* values = s.values + range.from * s.dim;
    const auto multiply_values = [&](const Factors<Number>& f) {
        if constexpr (Form::kInPlace) {
            if (in_place) {
                return Form::multiply_values(pages, value_slots.groups + range.from / 8, f, ahead);
            }
        }
        form.multiply(f, ahead);
    };
    const auto raise_rows_of = [&](std::int64_t row, std::int64_t rows, float* scores) {
        for (std::int64_t i = 0; i < rows && (key_slots.scaled || special(job)); ++i) {
            if (key_slots.scaled) {
                multiply_by(scores + i * kKeyTile, key_slots.scales, range);
            }
            if (special(job)) {
                adjust(job, s.rows[row + i], factor, first, range, scores + i * kKeyTile);
            }
        }
        raise(s, row, rows, scores, special(job) ? 1.0F : factor, range);
    };
    const auto sum_up = [&](std::int64_t row, std::int64_t side, std::int64_t from, std::int64_t end) {
        const Factors<Number> f{s.weights + side + range.from,
                                kKeyTile,
                                values + from * Form::kPair,
                                s.dim * Form::kPair,
                                size,
                                s.sums + row * s.dim + from,
                                s.dim,
                                block_at(row),
                                end - from,
                                true};
        multiply_values(f);
        if (broken && end == s.dim) {
            add_broken(pages, value_slots, row, block_at(row), s.weights + side, s);
        }
    };
    // The products of the next block and of the one before are made piece by piece between the weights of some rows of
    // this one: none waits for another, and tiles are multiplied while vectors are.
    constexpr std::int64_t kPart = 8, kRaised = 16, kSide = kMostBlock * kKeyTile;
    constexpr std::int64_t kParts = (Form::kBlockRows + kPart - 1) / kPart;
    const std::int64_t piece = round_up((s.dim + kParts - 1) / kParts, Form::kPieceStep);
    std::int64_t before = begin, side_before = 0, side = 0;
    for (std::int64_t row = begin; row < count; side_before = side, side = (side + kSide) % (kSides * kSide)) {
        const std::int64_t block = block_at(row), next = next_block(row + Form::kBlockRows);
        for (std::int64_t part = 0; part < kParts; ++part) {
            const std::int64_t at = part * kPart, place = side + at * kKeyTile;
            if (at % kRaised == 0 && at < block) {
                raise_rows_of(row + at, block - at < kRaised ? block - at : kRaised, s.scores + place);
            }
            if (part == kParts / 2 && next < count) {
                score(next, (side + kSide) % (kSides * kSide));
            }
            if (at < block) {
                weigh_rows(s, row + at, block - at < kPart ? block - at : kPart, s.scores + place, s.weights + place,
                           special(job) ? 1.0F : factor, range, value_slots);
            }
            const std::int64_t from = part * piece, end = from + piece < s.dim ? from + piece : s.dim;
            if (row != begin && from < end) {
                sum_up(before, side_before, from, end);
            }
        }
        before = row;
        row = next;
    }
    sum_up(before, side_before, 0, s.dim);
    ahead.ask(kAllLines);
}

template <typename Form>
void begin_merging(std::int64_t dim, std::int64_t count, Scratch<Form>& s) {
    std::memset(s.merged, 0, static_cast<std::size_t>(count * (dim + 2)) * 4);
    for (std::int64_t i = 0; i < count; ++i) {
        s.merged[i * (dim + 2) + dim] = kNone;
    }
}

// What rows have summed up becomes part of what they have merged, and they begin anew.
template <typename Form>
void end_split(std::int64_t dim, std::int64_t count, Scratch<Form>& s) {
    for (std::int64_t i = 0; i < count; ++i) {
        float *sums = s.sums + i * s.dim, *totals = s.totals + i * Lanes::kCount;
        merge_row(s.merged + i * (dim + 2), sums, s.maxima[i], sum8(load8(totals)), dim);
        std::memset(sums, 0, static_cast<std::size_t>(s.dim) * 4);
        std::memset(totals, 0, Lanes::kCount * 4);
        s.maxima[i] = kNone;
    }
}

// `next` is what this thread will probably compute then, or null.
template <typename Form>
void attend_as(const AttentionJob& job, const AttentionItem& item, const AttentionItem* next, float* scratch) {
    const std::int64_t count = item.num_queries * job.group, dim = job.kv.head_dim;
    Scratch<Form> s = split_scratch<Form>(job, count, scratch);
    Form form;
    begin_rows(job, item, count, s);
    const bool splits = item.first_key / kSplitKeys < (item.end_key - 1) / kSplitKeys;
    if (splits) {
        begin_merging(dim, count, s);
    }
    const float factor = score_factor(job, item.kv_head);
    Walk walk = walk_from(job, item, item.first_key / 8 * 8);
    std::int64_t first = item.first_key / s.tile * s.tile;
    Places next_keys{}, next_values{};
    locate(job, item, first, s.tile, walk, next_keys, next_values);
    for (; first < item.end_key; first += s.tile) {
        if (splits && first % kSplitKeys == 0) {
            end_split(dim, count, s);
        }
        const Places keys = next_keys, values = next_values;
        std::int64_t begin = 0, end = locate(job, item, first + s.tile, s.tile, walk, next_keys, next_values);
        if (first + s.tile >= item.end_key && next) {
            Walk there = walk_from(job, *next, next->first_key / 8 * 8);
            begin = next->first_key % s.tile / 8;
            end = locate(job, *next, next->first_key / s.tile * s.tile, s.tile, there, next_keys, next_values);
        }
        const char* runs[kMostRuns];
        Ahead ahead(job.kv, next_keys, next_values, begin, end, runs);
        s.whole = all_see_tile(job, item, first, s.tile);
        const KeyBits any = s.whole ? bits_between(0, s.tile) : look(job, item, first, s.tile, count, s.rows);
        if (any != 0) {
            attend_tile(job, factor, first, count, any, keys, values, form, s, ahead);
        }
    }
    if (splits) {
        end_split(dim, count, s);
    }
    for (std::int64_t i = 0; i < count; ++i) {
        const Row& row = s.rows[i];
        if (splits) {
            const float* merged = s.merged + i * (dim + 2);
            finish_row(job, row.head, merged[dim], merged[dim + 1], merged, out_row(job, item, i));
            continue;
        }
        float *sums = s.sums + i * s.dim, total = sum8(load8(s.totals + i * Lanes::kCount));
        if (item.partial) {
            float* partial = item.partial + i * (dim + 2);
            std::memcpy(partial, sums, static_cast<std::size_t>(dim) * 4);
            partial[dim] = s.maxima[i];
            partial[dim + 1] = total;
        } else {
            finish_row(job, row.head, s.maxima[i], total, sums, out_row(job, item, i));
        }
    }
}

void attend(const AttentionJob& job, const AttentionItem& item, const AttentionItem* next, float* scratch) {
#if defined(__AVX512BF16__) || defined(OCTAVO_TILES)
    if (job.kv.dtype != DType::kF32 && job.kv.dtype != DType::kF16) {
        return attend_as<Bf16Pairs>(job, item, next, scratch);
    }
#endif
    attend_as<Floats>(job, item, next, scratch);
}
