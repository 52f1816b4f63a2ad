// Reads the keys and values of a tile from pages of any layout and type.

// Where the keys or the values of a tile lie in the cache, eight slots at a time.
struct Places {
    const char* at[kGroups];
    const char* scales[kGroups];  // float16 [8]; null: none
};

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

// The groups of eight that the item looks at in the tile that begins at position `first`: the place after the last. The
// others stay as they are: their blocks may not even be there.
inline std::int64_t locate(const AttentionJob& job, const AttentionItem& item, std::int64_t first, std::int64_t tile,
                           Walk& walk, Places& keys, Places& values) {
    const std::int64_t skipped = item.first_key > first ? (item.first_key - first) / 8 : 0;
    std::int64_t i = skipped;
    for (; 8 * i < tile && first + 8 * i < item.end_key; ++i) {
        locate_group(job.kv, job.kv.keys, item.kv_head, walk, i, keys);
        locate_group(job.kv, job.kv.values, item.kv_head, walk, i, values);
        walk.slot += 8;
        if (walk.slot == job.kv.block_size) {
            walk = {walk.block + 1, 0};
        }
    }
    return i;
}

// Eight slots whose dimensions follow each other.
struct Group {
    const char* at;
    std::int64_t stride;  // from one slot to the next, in bytes
};

struct Slots {
    Group groups[kGroups];
    float scales[kKeyTile];
    bool scaled;  // a number is that of the cache times the scale of its slot

    const char* at(std::int64_t key) const { return groups[key / 8].at + key % 8 * groups[key / 8].stride; }
};

// As many slots as there are lanes, from `key` on.
struct SlotLanes {
    Group groups[Lanes::kCount / 8];

    SlotLanes(const Slots& slots, std::int64_t key) {
#pragma GCC unroll 2
        for (std::int64_t i = 0; i < Lanes::kCount / 8; ++i) {
            groups[i] = slots.groups[key / 8 + i];
        }
    }
    const char* at(std::int64_t lane) const { return groups[lane / 8].at + lane % 8 * groups[lane / 8].stride; }
};

// The lines of the tile after this one. They are asked for a few at a time while this tile is worked on: requests in
// bursts fill the queue of misses, and then loads wait that miss nothing.
class Ahead {
  public:
    // Groups [first, end) of keys, then of values. Runs shorter than a row are left to the processor.
    Ahead(const KvPages& pages, const Places& keys, const Places& values, std::int64_t first, std::int64_t end,
          const char** runs)
        : run_(runs), end_(runs) {
        const std::int64_t size = size_in_cache(pages.dtype), row = pages.head_dim * size;
        const std::int64_t stride = pages.keys.slot * size, slots = stride == row ? 1 : 8;
        if (pages.keys.run != pages.head_dim || pages.values.run != pages.head_dim) {
            return;
        }
        bytes_ = 8 / slots * row;
        for (const Places* places : {&keys, &values}) {
            for (std::int64_t i = first * slots; i < end * slots; ++i) {
                *end_++ = places->at[i / slots] + i % slots * stride;
            }
        }
        begin_run();
    }
    __attribute__((always_inline)) void ask(std::int64_t lines) {
        for (; lines > 0 && run_ != end_; --lines) {
            fetch(at_);
            at_ += 64;
            if (at_ >= stop_) {
                ++run_;
                begin_run();
            }
        }
    }

  private:
    __attribute__((always_inline)) void begin_run() {
        if (run_ != end_) {
            at_ = *run_;
            stop_ = at_ + bytes_;
        }
    }

    const char *const *run_, **end_;
    const char *at_ = nullptr, *stop_ = nullptr;
    std::int64_t bytes_ = 0;
};
constexpr std::int64_t kMostRuns = 2 * kKeyTile, kAllLines = std::numeric_limits<std::int64_t>::max();

// What is asked for while so many bytes are packed: half as much. Products ask for the rest.
constexpr std::int64_t lines_for(std::int64_t bytes) { return bytes / 128; }

alignas(64) constexpr float kZeros[kMostHeadDim] = {};  // the dimensions of a slot that nobody looks at

// Copies the slots whose bit is set, and zeros for the others.
inline void gather(const KvPages& pages, const KvSide& side, const char* from, KeyBits slots, char* to) {
    const std::int64_t size = size_in_cache(pages.dtype), row = pages.head_dim * size;
    for (std::int64_t slot = 0; slot < 8; ++slot, to += row) {
        if ((slots >> slot & 1) == 0) {
            std::memset(to, 0, static_cast<std::size_t>(row));
            continue;
        }
        const char* run = from + slot * side.slot * size;
        for (std::int64_t d = 0; d < pages.head_dim; d += side.run, run += side.outer * size) {
            std::memcpy(to + d * size, run, static_cast<std::size_t>(side.run * size));
        }
    }
}

// The slots of a tile whose bit is set. Others may hold anything, or not be there, and become zeros.
inline void take(const KvPages& pages, const KvSide& side, const Places& here, KeyBits looked, char* room,
                 Slots& slots) {
    const std::int64_t size = size_in_cache(pages.dtype), row = pages.head_dim * size;
    const bool together = side.run == pages.head_dim;
    slots.scaled = side.slot_scales != nullptr;
    for (std::int64_t i = 0; i < kGroups; ++i, looked >>= 8, room += 8 * row) {
        const KeyBits eight = looked & 0xff;
        const auto* zeros = reinterpret_cast<const char*>(kZeros);
        Group& group = slots.groups[i];
        group = {zeros, 0};
        if (eight == 0xff && together) {
            group.at = here.at[i];
            group.stride = side.slot * size;
        } else if (eight != 0) {
            gather(pages, side, here.at[i], eight, room);
            group.at = room;
            group.stride = row;
        }
        for (std::int64_t slot = 0; slots.scaled && slot < 8; ++slot) {
            std::uint16_t half = 0;
            if ((eight >> slot & 1) != 0) {
                std::memcpy(&half, here.scales[i] + 2 * slot, 2);
            }
            slots.scales[8 * i + slot] = half_to_float(half);
        }
    }
}
