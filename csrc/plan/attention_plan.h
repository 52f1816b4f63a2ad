// Which thread block does which part of a step's attention: worked out on the host once per step, for all layers.
//
// Slots are thread blocks that all run at once; each works off its items in order. A decode's work is laid out as one
// line, sequence after sequence and head after head, and cut into pieces of equal cost, one per slot. So the load is
// even whatever the lengths are, a sequence that fits is never split, and there are at most two partial results per
// slot.
#pragma once

#include <cstdint>
#include <vector>

namespace octavo::plan {

// Keys [begin, end) for one group of query heads of one sequence. A row of int32 on the device, in this order.
struct Item {
    std::int32_t sequence;
    std::int32_t head;   // group of query heads; prefill: kv head
    std::int32_t begin;  // decode: first key; prefill: first row of the query tile
    std::int32_t end;
    std::int32_t partial;  // where this part's result goes; -1: it is the whole and goes to the output
    std::int32_t first;    // where the results of all parts begin, in order of keys
    std::int32_t parts;    // of (sequence, head)
    std::int32_t counter;  // counts the parts that are done
};

constexpr std::int32_t kTile = 64;  // pieces begin at multiples of it

struct Shape {
    std::int32_t num_heads = 1;  // groups of query heads
    std::int32_t num_slots = 1;
    std::int32_t window = 0;         // keys a query sees; 0: all
    std::int32_t least_piece = 128;  // keys that are worth a slot of their own
    std::int32_t item_cost = 64;     // of beginning an item, in keys
    std::int32_t fixed_piece = 0;    // > 0: every piece but the last has this length, whatever else is in the batch
};

struct Plan {
    std::vector<std::int32_t> slots;  // [num_slots + 1]: items of slot i are [slots[i], slots[i + 1])
    std::vector<Item> items;
    std::int32_t num_partials = 0;
    std::int32_t num_counters = 0;
};

// Every key that a query sees is in exactly one item of each head; a sequence without keys has one empty item.
Plan plan_decode(const std::vector<std::int32_t>& lens, const Shape& shape);

// The most items, and partials, that a plan of so many sequences can have (keys: the longest sequence, for fixed
// pieces).
std::int64_t max_items(std::int64_t sequences, const Shape& shape, std::int64_t keys);
std::int64_t max_partials(std::int64_t sequences, const Shape& shape, std::int64_t keys);

// Tiles of `tile` rows; sequence i has q_lens[i] * group rows per head. The longest first, each to the slot with the
// least to do.
Plan plan_prefill(const std::vector<std::int32_t>& q_lens, const std::vector<std::int32_t>& lens, std::int32_t group,
                  std::int32_t tile, const Shape& shape);

// Neighbouring (from, to) pairs of blocks as runs, so that one copy moves several blocks. The order of pairs is kept.
struct Run {
    std::int64_t from, to, blocks;
};
std::vector<Run> coalesce(const std::vector<std::int64_t>& from, const std::vector<std::int64_t>& to);

}  // namespace octavo::plan
