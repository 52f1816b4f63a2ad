// Plans which thread block does which part of a step's attention. The host does it once per step, for all layers.
//
// Queries of a sequence that share a kv head are rows: row r is query head r % group of token r / group. A tile is some
// rows, which one thread block computes against a range of keys. Slots are thread blocks that all run at once; each
// computes its items in order. Work is laid out as one line, tile after tile, and cut into pieces of equal cost, one
// per slot. So the load is even whatever the lengths are, a tile that fits is never split, and there are at most two
// partial results per slot. A tile has at most kMostParts parts: many slots then wait for one long sequence, but
// merging more parts would take longer. Where whole tiles are even enough, nothing is cut.
#pragma once

#include <cstdint>
#include <vector>

namespace octavo::plan {

// An item: the keys [begin, end) for the tile that starts at `row`. On the device it is a row of int32, in this order.
struct Item {
    std::int32_t sequence;
    std::int32_t head;   // kv head
    std::int32_t row;    // the first row of the tile
    std::int32_t begin;  // first key
    std::int32_t end;
    std::int32_t part;   // the number of this part among the tile's `parts`, in order of keys
    std::int32_t parts;  // 1: the result goes to the output
    std::int32_t first;  // the place of the tile's partial results, and of the counter of those that are done
};

constexpr std::int32_t kTile = 64;        // pieces begin at multiples of so many keys
constexpr std::int32_t kMostParts = 256;  // of a tile, unless pieces have a fixed length

struct Shape {
    std::int32_t num_heads = 1;  // kv heads
    std::int32_t group = 1;      // query heads of each
    std::int32_t rows = 8;       // of a tile
    std::int32_t num_slots = 1;
    std::int32_t window = 0;         // how many keys a query sees; 0: all
    std::int32_t least_piece = 128;  // keys that are worth a slot of their own
    std::int32_t item_cost = 64;     // the cost of beginning an item, in keys
    std::int32_t fixed_piece = 0;    // > 0: every piece but the last has this length, whatever the batch holds
    double even_enough = 1.0;        // tiles stay whole up to this ratio of the heaviest slot's load to the mean load
};

struct Plan {
    std::vector<std::int32_t> slots;  // [num_slots + 1]: items of slot i are [slots[i], slots[i + 1])
    std::vector<Item> items;
    std::int32_t num_partials = 0;
};

// Sequence i has queries for its last q_lens[i] of kv_lens[i] keys, or (0) none: then it has no item. Every key that a
// row sees is in exactly one item of the row's tile; a tile that sees nothing has one empty item.
Plan plan_attention(const std::vector<std::int32_t>& q_lens, const std::vector<std::int32_t>& kv_lens,
                    const Shape& shape);

// The most items, and partial results, that a plan of so many sequences and tokens can have (keys: the longest
// sequence, for fixed pieces).
std::int64_t max_items(std::int64_t sequences, std::int64_t tokens, const Shape& shape, std::int64_t keys);
std::int64_t max_partials(std::int64_t sequences, std::int64_t tokens, const Shape& shape, std::int64_t keys);

}  // namespace octavo::plan
