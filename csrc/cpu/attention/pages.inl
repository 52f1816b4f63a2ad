// Reads the keys and values of a tile from pages of any layout and type.

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

inline void widen_columns(const AttentionJob& job, const KvSide& side, const char* from, float* eight, float* to) {
    const std::int64_t dim = job.kv.head_dim;
    const bool ready = job.kv.dtype == DType::kF32 && side.run == dim;
    if (!ready) {
        with_type(job.kv.dtype, [&](auto type) { widen<decltype(type)::value>(job.kv, side, from, eight); });
    }
    const float* rows = ready ? reinterpret_cast<const float*>(from) : eight;
    for (std::int64_t d = 0; d < dim; d += 8) {
        transpose8(rows + d, ready ? side.slot : dim, to + 8 * d);
    }
}

// A sequence's blocks, walked through eight slots a step.
struct Walk {
    const std::int32_t* block;
    std::int64_t slot;
};

inline Walk walk_from(const AttentionJob& job, const AttentionItem& item, std::int64_t position) {
    return {item.table + position / job.kv.block_size, position % job.kv.block_size};
}

inline void locate_group(const KvPages& pages, const KvSide& side, std::int64_t kv_head, const Walk& walk,
                         std::int64_t group, Places& places) {
    places.at[group] = slot_place(pages, side, *walk.block, kv_head, walk.slot);
    if (side.slot_scales) {
        places.scales[group] = slot_scale(side, *walk.block, kv_head, walk.slot);
    }
}

// The groups of eight that the item looks at in the tile that begins at position `first`. The others stay as they are:
// their blocks may not even be there.
inline void locate(const AttentionJob& job, const AttentionItem& item, std::int64_t first, Walk& walk, Places& keys,
                   Places& values) {
    const std::int64_t skipped = item.first_key > first ? (item.first_key - first) / 8 : 0;
    for (std::int64_t i = skipped; i < kGroups && first + 8 * i < item.end_key; ++i) {
        locate_group(job.kv, job.kv.keys, item.kv_head, walk, i, keys);
        locate_group(job.kv, job.kv.values, item.kv_head, walk, i, values);
        walk.slot += 8;
        if (walk.slot == job.kv.block_size) {
            walk = {walk.block + 1, 0};
        }
    }
}

// The groups of a tile that have slots in [low, high), in a form to work on.
inline Slots take(const AttentionJob& job, const KvSide& side, Form form, const Places& here, const Places& next,
                  std::int64_t low, std::int64_t high, float* eight, Room& room) {
    const KvPages& pages = job.kv;
    if (form == Form::kInPlace) {
        return {form, pages.dtype, side.slot * size_in_cache(pages.dtype), here.at, here.scales, next.at};
    }
    for (std::int64_t i = low / 8; 8 * i < high; ++i) {
        float* to = room.floats + 8 * i * pages.head_dim;
        room.at[i] = reinterpret_cast<const char*>(to);
        if (form == Form::kColumns) {
            widen_columns(job, side, here.at[i], eight, to);
        } else {
            with_type(pages.dtype, [&](auto type) { widen<decltype(type)::value>(pages, side, here.at[i], to); });
        }
    }
    return {form, DType::kF32, pages.head_dim * 4, room.at, here.scales, next.at};
}

// Asks for eight slots of the next tile while this one is worked on: pages end the hardware's guesses.
inline void fetch_group(const AttentionJob& job, const KvSide& side, const char* at) {
    const std::int64_t size = size_in_cache(job.kv.dtype);
    for (std::int64_t slot = 0; slot < 8; ++slot) {
        for (std::int64_t i = 0; i < job.kv.head_dim * size; i += 64) {
            fetch_second(at + slot * side.slot * size + i);
        }
    }
}
