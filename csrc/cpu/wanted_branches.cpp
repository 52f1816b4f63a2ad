// What the branches of a step want of its logits: see octavo/wanted_logits.h.
#include <algorithm>
#include <numeric>

#include "adjust.h"
#include "octavo/wanted_logits.h"
#include "row_askers.h"

namespace octavo {
namespace {

constexpr std::int64_t kLikeliest = 16,
                       kNamed = 4;  // at most this part of the vocabulary: more would cost as much as all

void add_listed(std::vector<std::int32_t>& named, const TensorRef& ids, const ListPart& part) {
    for (std::int64_t i = part.begin; i < part.end; ++i) {
        if (at<std::int64_t>(ids, i) >= 0) {
            named.push_back(static_cast<std::int32_t>(at<std::int64_t>(ids, i)));
        }
    }
}

}  // namespace

WantedLogits::WantedLogits(std::int64_t rows, std::int64_t vocabulary, const Draws& draws,
                           const Adjustments& adjustments, const TensorRef& counts, const TensorRef& targets,
                           const TensorRef& drawn, const TensorRef& totals) {
    check::wanted(rows, vocabulary, draws, adjustments, counts, targets, drawn, totals);
    const auto branches = std::make_shared<SampledBranches>();
    branches->draws = branches->kept(draws);
    branches->adjustments = branches->kept(adjustments);
    branches->drawn = drawn;
    branches->totals = totals;
    std::vector<std::vector<std::int64_t>> members(static_cast<std::size_t>(rows));
    for (std::int64_t i = 0; i < draws.rows.shape[0]; ++i) {
        drawn.as<std::int64_t>()[i] = -1;
        totals.as<std::int64_t>()[i] = 0;
        members[static_cast<std::size_t>(at<std::int64_t>(draws.rows, i))].push_back(i);
    }
    for (const std::vector<std::int64_t>& here : members) {
        const std::size_t asked = branches->asked.size();
        if (!want(rows_.emplace_back(), here, vocabulary, draws, counts, targets, *branches)) {
            rows_.back() = {};
            branches->asked.resize(asked);
        }
    }
    branches_ = branches;
}

// Of all branches of a row. False: all logits.
bool WantedLogits::want(Row& row, const std::vector<std::int64_t>& here, std::int64_t vocabulary, const Draws& draws,
                        const TensorRef& counts, const TensorRef& targets, SampledBranches& branches) {
    const Adjustments& by = branches.adjustments;
    const auto mask_of = [&](std::int64_t i) {
        return draws.mask_of.given() ? at<std::int32_t>(draws.mask_of, i) : -1;
    };
    std::int64_t left = 0;
    if (!here.empty() && mask_of(here[0]) >= 0) {
        const auto* words = draws.masks.as<std::uint32_t>() + mask_of(here[0]) * draws.masks.stride[0];
        row.mask.assign(words, words + draws.masks.shape[1]);
        left = std::accumulate(row.mask.begin(), row.mask.end(), std::int64_t{0},
                               [](auto sum, auto word) { return sum + __builtin_popcount(word); });
        row.top = 1;  // whether one can be sampled at all is asked of all
    }
    for (const std::int64_t i : here) {
        const bool free = ListPart(by.allowed_ends, i).empty(), is_drawn = free && at<float>(draws.temperature, i) > 0;
        const std::int64_t top_k = at<std::int32_t>(draws.top_k, i);
        std::int64_t count = is_drawn ? vocabulary : 1;
        for (const std::int64_t limit : {top_k, left}) {
            count = limit > 0 ? std::min(count, limit) : count;
        }
        if (count > std::max<std::int64_t>(vocabulary / kLikeliest, 1)) {
            const bool cut = at<float>(draws.top_p, i) < 1 || at<float>(draws.min_p, i) > 0;
            if ((top_k > 0 && top_k < vocabulary) || (further_of(draws, i) != nullptr && !cut)) {
                return false;
            }
            branches.asked.push_back({i, at<std::int64_t>(draws.rows, i), false});
            count = 1;
        }
        row.count = std::max(row.count, static_cast<std::int32_t>(count));
        const std::int32_t num = counts.given() ? at<std::int32_t>(counts, i) : -1;
        if (free && num >= 0) {
            branches.asked.push_back({i, at<std::int64_t>(draws.rows, i), true});
            row.top = std::max({row.top, std::min(num, static_cast<std::int32_t>(vocabulary)), 1});
        }
        if (targets.given()) {
            row.named.push_back(static_cast<std::int32_t>(at<std::int64_t>(targets, i)));
        }
        add_listed(row.named, by.seen_ids, ListPart(by.seen_ends, i));
        add_listed(row.named, by.bias_ids, ListPart(by.bias_ends, i));
        add_listed(row.named, by.allowed_ids, ListPart(by.allowed_ends, i));
        row.asks = !branches.asked.empty() && branches.asked.back().row == at<std::int64_t>(draws.rows, i) ? 1 : 0;
        if (mask_of(i) != mask_of(here[0])) {
            return false;
        }
    }
    std::sort(row.named.begin(), row.named.end());
    row.named.erase(std::unique(row.named.begin(), row.named.end()), row.named.end());
    return !here.empty() && static_cast<std::int64_t>(row.named.size()) <= vocabulary / kNamed;
}

}  // namespace octavo
