#include "plan/attention_plan.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace octavo::plan {
namespace {

using Lengths = std::vector<std::int32_t>;

std::int64_t cost_of(const Item& item, const Shape& shape) { return item.end - item.begin + shape.item_cost; }

// All tiles, whole.
std::vector<Item> whole_tiles(const Lengths& q_lens, const Lengths& kv_lens, const Shape& shape) {
    std::vector<Item> tiles;
    for (std::size_t s = 0; s < q_lens.size(); ++s) {
        const std::int32_t rows = q_lens[s] * shape.group, position = kv_lens[s] - q_lens[s];
        for (std::int32_t head = 0; head < shape.num_heads; ++head) {
            for (std::int32_t row = 0; row < rows; row += shape.rows) {
                const std::int32_t first = position + row / shape.group;
                const std::int32_t last = position + (std::min(rows, row + shape.rows) - 1) / shape.group;
                const std::int32_t begin = shape.window > 0 ? std::max(0, first - shape.window + 1) : 0;
                tiles.push_back({static_cast<std::int32_t>(s), head, row, begin, std::max(begin, last + 1), 0, 1, 0});
            }
        }
    }
    return tiles;
}

// Gives the parts of one tile, which are the last `parts` items, their places.
void number_parts(Plan& plan, std::int32_t parts) {
    if (parts == 1) {
        return;
    }
    const std::size_t first = plan.items.size() - static_cast<std::size_t>(parts);
    for (std::int32_t i = 0; i < parts; ++i) {
        Item& item = plan.items[first + static_cast<std::size_t>(i)];
        item.part = i;
        item.parts = parts;
        item.first = plan.num_partials;
    }
    plan.num_partials += parts;
}

Plan cut_evenly(const std::vector<Item>& tiles, const Shape& shape) {
    Plan plan;
    std::int64_t total = std::int64_t{shape.num_slots} * shape.item_cost;  // a cut begins one more item
    std::int32_t longest = 0;
    for (const Item& tile : tiles) {
        total += cost_of(tile, shape);
        longest = std::max(longest, tile.end - tile.begin);
    }
    const std::int32_t least_piece = std::max(shape.least_piece, longest / (kMostParts - 2) + 1);  // 2: at both ends
    const std::int64_t share = std::max<std::int64_t>(
        {(total + shape.num_slots - 1) / shape.num_slots, std::int64_t{least_piece} + shape.item_cost, kTile});
    std::int64_t done = 0;  // cost of what slots before and this one have
    Lengths sizes{0};
    const auto slot_end = [&] { return share * static_cast<std::int64_t>(sizes.size()); };
    const auto next_slot = [&] {
        if (static_cast<std::int32_t>(sizes.size()) < shape.num_slots) {
            sizes.push_back(0);
            return true;
        }
        return false;
    };
    for (const Item& tile : tiles) {
        std::int32_t at = tile.begin, parts = 0;
        do {
            // Never a piece of less than half a tile: what is left of this slot's share is then let go.
            while (slot_end() - done < shape.item_cost + kTile / 2 && next_slot()) {
            }
            const std::int64_t room = std::max<std::int64_t>(slot_end() - done - shape.item_cost, 0);
            std::int64_t end = (at + room + kTile / 2) / kTile * kTile;
            const bool last_slot = static_cast<std::int32_t>(sizes.size()) == shape.num_slots;
            if (last_slot || end <= at || end + kTile / 2 > tile.end) {
                end = tile.end;
            }
            Item item = tile;
            item.begin = at;
            item.end = static_cast<std::int32_t>(end);
            plan.items.push_back(item);
            ++sizes.back();
            ++parts;
            done += cost_of(item, shape);
            at = item.end;
        } while (at < tile.end);
        number_parts(plan, parts);
    }
    sizes.resize(static_cast<std::size_t>(shape.num_slots), 0);
    plan.slots.assign(1, 0);
    for (const std::int32_t size : sizes) {
        plan.slots.push_back(plan.slots.back() + size);
    }
    return plan;
}

// The dearest first, each to the slot with the least to do. Returns the heaviest load.
std::int64_t spread(Plan& plan, const Shape& shape) {
    std::vector<std::size_t> order(plan.items.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
        return cost_of(plan.items[a], shape) > cost_of(plan.items[b], shape);
    });
    using Load = std::pair<std::int64_t, std::int32_t>;
    std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
    for (std::int32_t slot = 0; slot < shape.num_slots; ++slot) {
        loads.emplace(0, slot);
    }
    std::vector<std::vector<Item>> slots(static_cast<std::size_t>(shape.num_slots));
    std::int64_t heaviest = 0;
    for (const std::size_t i : order) {
        auto [load, slot] = loads.top();
        loads.pop();
        slots[static_cast<std::size_t>(slot)].push_back(plan.items[i]);
        load += cost_of(plan.items[i], shape);
        heaviest = std::max(heaviest, load);
        loads.emplace(load, slot);
    }
    plan.items.clear();
    plan.slots.assign(1, 0);
    for (const std::vector<Item>& items : slots) {
        plan.items.insert(plan.items.end(), items.begin(), items.end());
        plan.slots.push_back(static_cast<std::int32_t>(plan.items.size()));
    }
    return heaviest;
}

Plan cut_at_multiples(const std::vector<Item>& tiles, const Shape& shape) {
    Plan plan;
    for (const Item& tile : tiles) {
        std::int32_t at = tile.begin, parts = 0;
        do {
            Item item = tile;
            item.begin = at;
            item.end = std::min(tile.end, (at / shape.fixed_piece + 1) * shape.fixed_piece);
            plan.items.push_back(item);
            at = item.end;
            ++parts;
        } while (at < tile.end);
        number_parts(plan, parts);
    }
    spread(plan, shape);
    return plan;
}

}  // namespace

Plan plan_attention(const Lengths& q_lens, const Lengths& kv_lens, const Shape& shape) {
    const std::vector<Item> tiles = whole_tiles(q_lens, kv_lens, shape);
    if (shape.fixed_piece > 0) {
        return cut_at_multiples(tiles, shape);
    }
    if (shape.even_enough > 1.0) {
        Plan whole;
        whole.items = tiles;
        std::int64_t total = 0;
        for (const Item& tile : tiles) {
            total += cost_of(tile, shape);
        }
        if (static_cast<double>(spread(whole, shape) * shape.num_slots) <=
            shape.even_enough * static_cast<double>(total)) {
            return whole;
        }
    }
    return cut_evenly(tiles, shape);
}

std::int64_t max_items(std::int64_t sequences, std::int64_t tokens, const Shape& shape, std::int64_t keys) {
    const std::int64_t tiles = (sequences + tokens * shape.group / shape.rows) * shape.num_heads;
    return shape.fixed_piece > 0 ? tiles * (keys / shape.fixed_piece + 2) : tiles + shape.num_slots;
}

std::int64_t max_partials(std::int64_t sequences, std::int64_t tokens, const Shape& shape, std::int64_t keys) {
    return shape.fixed_piece > 0 ? max_items(sequences, tokens, shape, keys) : 2 * std::int64_t{shape.num_slots};
}

}  // namespace octavo::plan
