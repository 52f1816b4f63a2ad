#include "plan/swap_plan.h"

#include <algorithm>
#include <utility>

namespace octavo::plan {

SwapPlan plan_swap(const ArenaForm& from, const ArenaForm& to, std::vector<std::pair<std::int64_t, std::int64_t>> pairs,
                   std::int64_t small_run) {
    std::sort(pairs.begin(), pairs.end());
    const bool dense = from.block == from.length && to.block == to.length;
    std::vector<Copy> layer;
    for (const auto& [block, place] : pairs) {
        const Copy next{block * from.block, place * to.block, from.length};
        if (dense && !layer.empty() && layer.back().from + layer.back().bytes == next.from &&
            layer.back().to + layer.back().bytes == next.to) {
            layer.back().bytes += next.bytes;
        } else {
            layer.push_back(next);
        }
    }
    SwapPlan plan{std::move(pairs), {}, false};
    plan.copies.reserve(layer.size() * static_cast<std::size_t>(from.num_layers));
    for (std::int64_t i = 0; i < from.num_layers; ++i) {
        for (const Copy& copy : layer) {
            plan.copies.push_back({copy.from + i * from.layer, copy.to + i * to.layer, copy.bytes});
        }
    }
    const auto count = static_cast<std::int64_t>(plan.copies.size());
    const std::int64_t total = static_cast<std::int64_t>(plan.pairs.size()) * from.num_layers * from.length;
    plan.by_kernel = count >= kManyCopies && total < small_run * count;
    return plan;
}

}  // namespace octavo::plan
