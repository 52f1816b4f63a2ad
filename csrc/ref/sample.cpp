#include "octavo/sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "element.h"
#include "octavo/draw.h"
#include "octavo/filters.h"

namespace octavo::ref {
namespace {

using Logits = std::vector<float>;
using Ids = std::vector<std::size_t>;

constexpr float kNever = -std::numeric_limits<float>::infinity();

bool bad(const Logits& x) {
    const auto wrong = [](float logit) { return std::isnan(logit) || logit == -kNever; };
    return std::any_of(x.begin(), x.end(), wrong) || *std::max_element(x.begin(), x.end()) == kNever;
}

// All tokens: the likeliest first, the lowest id first among equals.
Ids ordered(const Logits& x) {
    Ids ids(x.size());
    std::iota(ids.begin(), ids.end(), 0);
    std::stable_sort(ids.begin(), ids.end(), [&](std::size_t a, std::size_t b) { return x[a] > x[b]; });
    return ids;
}

template <typename Body>
void each_of(const TensorRef& ends, std::int64_t branch, Body body) {
    for (std::int64_t i = ends.given() ? get_int(ends, branch) : 0; ends.given() && i < get_int(ends, branch + 1);
         ++i) {
        body(i);
    }
}

void adjust(Logits& x, const Adjustments& by, std::int64_t branch) {
    const auto token = [&](const TensorRef& ids, std::int64_t i) -> float& {
        return x[static_cast<std::size_t>(get_int(ids, i))];
    };
    each_of(by.bias_ends, branch,
            [&](std::int64_t i) { token(by.bias_ids, i) += static_cast<float>(get(by.biases, i)); });
    each_of(by.seen_ends, branch, [&](std::int64_t i) {
        const auto factor = static_cast<float>(get(by.repetition, branch));
        float& logit = token(by.seen_ids, i);
        logit = (logit > 0 ? logit / factor : logit * factor) - static_cast<float>(get(by.seen_costs, i));
    });
    Logits allowed(x.size(), kNever);
    bool confined = false;
    each_of(by.allowed_ends, branch, [&](std::int64_t i) {
        confined = true;
        if (get_int(by.allowed_ids, i) >= 0) {
            allowed[static_cast<std::size_t>(get_int(by.allowed_ids, i))] = token(by.allowed_ids, i);
        }
    });
    x = confined ? allowed : x;
}

// Leaves to a branch what its mask allows.
Logits confined(const Logits& x, const Draws& draws, std::int64_t branch) {
    const std::int64_t row = draws.mask_of.given() ? get_int(draws.mask_of, branch) : -1;
    Logits open = x;
    for (std::size_t id = 0; row >= 0 && id < x.size(); ++id) {
        const auto word = static_cast<std::uint32_t>(
            draws.masks.as<std::int32_t>()[row * draws.masks.stride[0] + static_cast<std::int64_t>(id / 32)]);
        if ((word >> (id % 32) & 1U) == 0) {
            open[id] = kNever;
        }
    }
    return open;
}

// Tokens that are kept, as filters see them.
struct FilteredTokens {
    Ids& ids;
    const Logits& x;
    float highest, factor;

    template <typename Each>
    void each(Each body) const {
        for (const std::size_t id : ids) {
            const float power = draw::power_of(x[id], highest, factor);
            body(power, draw::weight_of_power(power));
        }
    }
    template <typename Amount>
    std::uint64_t sum(Amount amount) const {
        std::uint64_t total = 0;
        each([&](float power, float weight) { total += amount(power, weight); });
        return total;
    }
    template <typename Amount>
    std::uint64_t largest(Amount amount) const {
        std::uint64_t most = 0;
        each([&](float power, float weight) { most = std::max(most, std::uint64_t{amount(power, weight)}); });
        return most;
    }
    void narrow(const filters::Band& band) {
        const auto gone = [&](std::size_t id) { return !band.has(draw::power_of(x[id], highest, factor)); };
        ids.erase(std::remove_if(ids.begin(), ids.end(), gone), ids.end());
    }
};

std::size_t drawn(const Logits& x, const Draws& draws, std::int64_t branch) {
    Ids kept = ordered(x);
    const auto top_k = static_cast<std::size_t>(get_int(draws.top_k, branch));
    const auto top_p = static_cast<float>(get(draws.top_p, branch)),
               min_p = static_cast<float>(get(draws.min_p, branch));
    const float factor = draw::factor_of(static_cast<float>(get(draws.temperature, branch)));
    const float highest = x[kept[0]];
    const auto weight = [&](std::size_t id) { return draw::weight_of(x[id], highest, factor); };
    const auto mass = [&] {
        return std::accumulate(kept.begin(), kept.end(), std::uint64_t{0},
                               [&](std::uint64_t sum, std::size_t id) { return sum + weight(id); });
    };
    if (top_k > 0 && top_k < kept.size()) {
        kept.resize(top_k);
    }
    if (top_p < 1) {
        const std::uint64_t target = draw::share_of(top_p, mass());
        std::uint64_t sum = 0;
        std::size_t count = 0;
        while (sum < target) {
            sum += weight(kept[count++]);
        }
        kept.resize(count);
    }
    const auto least = static_cast<double>(draw::least_of(min_p));
    kept.erase(std::remove_if(kept.begin(), kept.end(),
                              [&](std::size_t id) { return static_cast<double>(weight(id)) < least; }),
               kept.end());
    const filters::Chance chance{
        static_cast<std::uint64_t>(draws.seed.as<std::int64_t>()[branch * draws.seed.stride[0]]),
        static_cast<std::uint32_t>(get_int(draws.branch, branch)),
        static_cast<std::uint32_t>(get_int(draws.index, branch))};
    if (draws.filters.given()) {
        float columns[sizeof filters::kOff / sizeof *filters::kOff];
        for (int i = 0; i < filters::kColumns; ++i) {
            columns[i] = static_cast<float>(get(draws.filters, branch, i));
        }
        FilteredTokens tokens{kept, x, highest, factor};
        filters::apply(tokens, columns, chance);
    }
    const std::uint64_t place = draw::place_of(chance.bits(0), mass());
    std::sort(kept.begin(), kept.end());
    std::uint64_t sum = 0;
    for (const std::size_t id : kept) {
        sum += weight(id);
        if (place < sum) {
            return id;
        }
    }
    return kept.back();
}

// The log-softmax of x, and its likeliest tokens.
void put_score(const Logits& x, std::int64_t token, const Scores& scores, std::int64_t branch) {
    const double highest = static_cast<double>(*std::max_element(x.begin(), x.end()));
    const std::int64_t given = scores.totals.given() ? get_int(scores.totals, branch) : 0;
    double total = std::ldexp(static_cast<double>(given), -draw::kWeightBits);
    for (const float logit : x) {
        total += given > 0 ? 0 : std::exp(static_cast<double>(logit) - highest);
    }
    const auto logprob = [&](std::size_t id) { return static_cast<double>(x[id]) - highest - std::log(total); };
    put(scores.logprobs, logprob(static_cast<std::size_t>(token)), branch);
    const Ids ids = ordered(x);
    for (std::int64_t i = 0; i < scores.top_ids.shape[1]; ++i) {
        const auto place = static_cast<std::size_t>(i);
        const bool listed = i < get_int(scores.counts, branch) && place < ids.size() && x[ids[place]] > kNever;
        put(scores.top_ids, listed ? static_cast<double>(ids[place]) : -1, branch, i);
        put(scores.top_logprobs, listed ? logprob(ids[place]) : static_cast<double>(kNever), branch, i);
    }
}

void put_no_score(const Scores& scores, std::int64_t branch) {
    put(scores.logprobs, std::numeric_limits<double>::quiet_NaN(), branch);
    for (std::int64_t i = 0; i < scores.top_ids.shape[1]; ++i) {
        put(scores.top_ids, -1, branch, i);
        put(scores.top_logprobs, static_cast<double>(kNever), branch, i);
    }
}

Logits row_of(const TensorRef& logits, std::int64_t row) {
    Logits x;
    for (std::int64_t i = 0; i < logits.shape[1]; ++i) {
        x.push_back(static_cast<float>(get(logits, row, i)));
    }
    return x;
}

}  // namespace

void sample(const TensorRef& ids, const TensorRef& logits, const Draws& draws, const Adjustments& adjustments,
            const Scores& scores) {
    check::sample(ids, logits, draws, adjustments, scores);
    for (std::int64_t branch = 0; branch < ids.shape[0]; ++branch) {
        Logits x = row_of(logits, get_int(draws.rows, branch));
        const bool scored = scores.counts.given() && get_int(scores.counts, branch) >= 0;
        bool good = !bad(x);
        if (good) {
            adjust(x, adjustments, branch);
            good = !bad(x);
        }
        std::int64_t token = kBadLogits;
        if (good) {
            const Logits open = confined(x, draws, branch);
            const bool greedy = get(draws.temperature, branch) <= 0;
            good = !bad(open);
            token = !good ? kNothingLeft
                          : static_cast<std::int64_t>(greedy ? ordered(open)[0] : drawn(open, draws, branch));
        }
        const std::int64_t known = draws.drawn.given() ? get_int(draws.drawn, branch) : -1;
        token = token != kBadLogits && known >= 0 ? known : token;
        put(ids, static_cast<double>(token), branch);
        if (scored) {
            good ? put_score(x, token, scores, branch) : put_no_score(scores, branch);
        }
    }
}

void score(const TensorRef& logits, const TensorRef& targets, const Scores& scores) {
    check::score(logits, targets, scores);
    for (std::int64_t row = 0; row < logits.shape[0]; ++row) {
        const Logits x = row_of(logits, row);
        bad(x) ? put_no_score(scores, row) : put_score(x, get_int(targets, row), scores, row);
    }
}

}  // namespace octavo::ref
