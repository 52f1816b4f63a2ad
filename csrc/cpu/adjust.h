// What a request changes of its logits before a token is chosen.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "drawer.h"
#include "octavo/sample.h"

namespace octavo {

// Where a branch's part of a list is.
struct ListPart {
    ListPart(const TensorRef& ends, std::int64_t branch)
        : begin(ends.given() ? at<std::int64_t>(ends, branch) : 0),
          end(ends.given() ? at<std::int64_t>(ends, branch + 1) : 0) {}
    bool empty() const { return begin == end; }

    std::int64_t begin, end;
};

inline bool adjusts(const Adjustments& by, std::int64_t branch) {
    return !ListPart(by.seen_ends, branch).empty() || !ListPart(by.bias_ends, branch).empty() ||
           !ListPart(by.allowed_ends, branch).empty();
}

inline void adjust(float* x, std::int64_t count, const Adjustments& by, std::int64_t branch) {
    const ListPart seen(by.seen_ends, branch), bias(by.bias_ends, branch), allowed(by.allowed_ends, branch);
    for (std::int64_t i = bias.begin; i < bias.end; ++i) {
        x[at<std::int64_t>(by.bias_ids, i)] += at<float>(by.biases, i);
    }
    for (std::int64_t i = seen.begin; i < seen.end; ++i) {
        float& logit = x[at<std::int64_t>(by.seen_ids, i)];
        const float factor = at<float>(by.repetition, branch);
        logit = (logit > 0 ? logit / factor : logit * factor) - at<float>(by.seen_costs, i);
    }
    if (!allowed.empty()) {
        std::vector<float> values;
        for (std::int64_t i = allowed.begin; i < allowed.end; ++i) {
            const std::int64_t id = at<std::int64_t>(by.allowed_ids, i);
            values.push_back(id >= 0 ? x[id] : kNever);
        }
        std::fill(x, x + count, kNever);
        for (std::int64_t i = allowed.begin; i < allowed.end; ++i) {
            const std::int64_t id = at<std::int64_t>(by.allowed_ids, i);
            if (id >= 0) {
                x[id] = values[static_cast<std::size_t>(i - allowed.begin)];
            }
        }
    }
}

}  // namespace octavo
