#include "plan/attention_plan.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <utility>

namespace octavo::plan {
namespace {

constexpr std::int32_t kNone = -1;

std::int32_t first_key(std::int32_t len, const Shape& shape) {
    return shape.window > 0 ? std::max(0, len - shape.window) : 0;
}

// Gives the parts of one (sequence, head), which are the last `parts` items, their places.
void number_parts(Plan& plan, std::size_t parts) {
    const auto count = static_cast<std::int32_t>(parts);
    for (std::size_t i = plan.items.size() - parts; i < plan.items.size(); ++i) {
        Item& item = plan.items[i];
        item.parts = count;
        item.first = plan.num_partials;
        item.counter = plan.num_counters;
        item.partial =
            parts == 1 ? kNone : plan.num_partials + static_cast<std::int32_t>(i + parts - plan.items.size());
    }
    if (parts > 1) {
        plan.num_partials += count;
        ++plan.num_counters;
    }
}

Plan plan_even(const std::vector<std::int32_t>& lens, const Shape& shape) {
    Plan plan;
    std::int64_t total = std::int64_t{shape.num_slots} * shape.item_cost;  // a cut begins one more item
    for (const std::int32_t len : lens) {
        total += (len - first_key(len, shape) + shape.item_cost) * std::int64_t{shape.num_heads};
    }
    const std::int64_t share = std::max<std::int64_t>(
        {(total + shape.num_slots - 1) / shape.num_slots, shape.least_piece + shape.item_cost, kTile});
    std::int64_t done = 0;  // cost of what slots before and this one have
    std::vector<std::int32_t> sizes{0};
    const auto slot_end = [&] { return share * static_cast<std::int64_t>(sizes.size()); };
    const auto next_slot = [&] {
        if (static_cast<std::int32_t>(sizes.size()) < shape.num_slots) {
            sizes.push_back(0);
            return true;
        }
        return false;
    };
    for (std::size_t s = 0; s < lens.size(); ++s) {
        for (std::int32_t head = 0; head < shape.num_heads; ++head) {
            std::int32_t at = first_key(lens[s], shape);
            std::size_t parts = 0;
            do {
                // Never a piece of less than half a tile: what is left of this slot's share is then let go.
                while (slot_end() - done < shape.item_cost + kTile / 2 && next_slot()) {
                }
                const std::int64_t room = std::max<std::int64_t>(slot_end() - done - shape.item_cost, 0);
                std::int64_t end = (at + room + kTile / 2) / kTile * kTile;
                const bool last_slot = static_cast<std::int32_t>(sizes.size()) == shape.num_slots;
                if (last_slot || end <= at || end + kTile / 2 > lens[s]) {
                    end = lens[s];
                }
                plan.items.push_back(
                    {static_cast<std::int32_t>(s), head, at, static_cast<std::int32_t>(end), kNone, 0, 1, 0});
                ++sizes.back();
                ++parts;
                done += end - at + shape.item_cost;
                at = static_cast<std::int32_t>(end);
            } while (at < lens[s]);
            number_parts(plan, parts);
        }
    }
    sizes.resize(static_cast<std::size_t>(shape.num_slots), 0);
    plan.slots.assign(1, 0);
    for (const std::int32_t size : sizes) {
        plan.slots.push_back(plan.slots.back() + size);
    }
    return plan;
}

// The dearest first, each to the slot with the least to do.
void spread(Plan& plan, const std::vector<std::int64_t>& costs, std::int32_t num_slots) {
    std::vector<std::size_t> order(plan.items.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return costs[a] > costs[b]; });
    using Load = std::pair<std::int64_t, std::int32_t>;
    std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
    for (std::int32_t slot = 0; slot < num_slots; ++slot) {
        loads.emplace(0, slot);
    }
    std::vector<std::vector<Item>> slots(static_cast<std::size_t>(num_slots));
    for (const std::size_t i : order) {
        auto [load, slot] = loads.top();
        loads.pop();
        slots[static_cast<std::size_t>(slot)].push_back(plan.items[i]);
        loads.emplace(load + costs[i], slot);
    }
    plan.items.clear();
    plan.slots.assign(1, 0);
    for (const std::vector<Item>& items : slots) {
        plan.items.insert(plan.items.end(), items.begin(), items.end());
        plan.slots.push_back(static_cast<std::int32_t>(plan.items.size()));
    }
}

Plan plan_fixed(const std::vector<std::int32_t>& lens, const Shape& shape) {
    Plan plan;
    std::vector<std::int64_t> costs;
    for (std::size_t s = 0; s < lens.size(); ++s) {
        for (std::int32_t head = 0; head < shape.num_heads; ++head) {
            std::int32_t at = first_key(lens[s], shape);
            std::size_t parts = 0;
            do {
                const std::int32_t end = std::min(lens[s], (at / shape.fixed_piece + 1) * shape.fixed_piece);
                plan.items.push_back({static_cast<std::int32_t>(s), head, at, end, kNone, 0, 1, 0});
                costs.push_back(end - at + shape.item_cost);
                at = end;
                ++parts;
            } while (at < lens[s]);
            number_parts(plan, parts);
        }
    }
    spread(plan, costs, shape.num_slots);
    return plan;
}

}  // namespace

Plan plan_decode(const std::vector<std::int32_t>& lens, const Shape& shape) {
    return shape.fixed_piece > 0 ? plan_fixed(lens, shape) : plan_even(lens, shape);
}

std::int64_t max_items(std::int64_t sequences, const Shape& shape, std::int64_t keys) {
    const std::int64_t whole = sequences * shape.num_heads;
    if (shape.fixed_piece > 0) {
        return whole * (keys / shape.fixed_piece + 2);
    }
    return whole + shape.num_slots;
}

std::int64_t max_partials(std::int64_t sequences, const Shape& shape, std::int64_t keys) {
    return shape.fixed_piece > 0 ? max_items(sequences, shape, keys) : 2 * std::int64_t{shape.num_slots};
}

Plan plan_prefill(const std::vector<std::int32_t>& q_lens, const std::vector<std::int32_t>& lens, std::int32_t group,
                  std::int32_t tile, const Shape& shape) {
    Plan plan;
    std::vector<std::int64_t> costs;
    for (std::size_t s = 0; s < lens.size(); ++s) {
        const std::int32_t rows = q_lens[s] * group;
        for (std::int32_t head = 0; head < shape.num_heads; ++head) {
            for (std::int32_t row = 0; row < rows; row += tile) {
                const std::int32_t end = std::min(rows, row + tile);
                const std::int32_t first = lens[s] - q_lens[s] + row / group,
                                   last = lens[s] - q_lens[s] + (end - 1) / group;
                const std::int32_t begin = shape.window > 0 ? std::max(0, first - shape.window + 1) : 0;
                plan.items.push_back({static_cast<std::int32_t>(s), head, row, end, kNone, 0, 1, 0});
                costs.push_back(last + 1 - begin + shape.item_cost);
            }
        }
    }
    spread(plan, costs, shape.num_slots);
    return plan;
}

std::vector<Run> coalesce(const std::vector<std::int64_t>& from, const std::vector<std::int64_t>& to) {
    std::vector<Run> runs;
    for (std::size_t i = 0; i < from.size(); ++i) {
        if (!runs.empty() && runs.back().from + runs.back().blocks == from[i] &&
            runs.back().to + runs.back().blocks == to[i]) {
            ++runs.back().blocks;
        } else {
            runs.push_back({from[i], to[i], 1});
        }
    }
    return runs;
}

}  // namespace octavo::plan
