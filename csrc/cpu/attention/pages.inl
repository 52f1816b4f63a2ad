// Keys and values of a tile, out of pages of any layout and type.

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

inline Ahead look_ahead(const AttentionJob& job, const AttentionItem& item, std::int64_t first) {
    const std::int64_t end = item.end_key < first + kKeyTile ? item.end_key : first + kKeyTile;
    const KvPages& pages = job.kv;
    return {take(job, item, pages.keys, first, item.first_key, end, true, nullptr),
            take(job, item, pages.values, first, item.first_key, end, true, nullptr)};
}
