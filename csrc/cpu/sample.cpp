#include "octavo/sample.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "drawer.h"
#include "octavo/pool.h"
#include "sample.h"

namespace octavo {
namespace {

// Where a branch's part of a list is.
struct Part {
    Part(const TensorRef& ends, std::int64_t branch)
        : begin(ends.given() ? at<std::int64_t>(ends, branch) : 0),
          end(ends.given() ? at<std::int64_t>(ends, branch + 1) : 0) {}
    bool empty() const { return begin == end; }

    std::int64_t begin, end;
};

bool adjusts(const Adjustments& by, std::int64_t branch) {
    return !Part(by.seen_ends, branch).empty() || !Part(by.bias_ends, branch).empty() ||
           !Part(by.allowed_ends, branch).empty();
}

void adjust(float* x, std::int64_t count, const Adjustments& by, std::int64_t branch) {
    const Part seen(by.seen_ends, branch), bias(by.bias_ends, branch), allowed(by.allowed_ends, branch);
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

void no_score(const Scores& scores, std::int64_t branch) {
    scores.logprobs.as<float>()[branch] = std::numeric_limits<float>::quiet_NaN();
    for (std::int64_t i = 0; i < scores.top_ids.shape[1]; ++i) {
        scores.top_ids.as<std::int64_t>()[branch * scores.top_ids.stride[0] + i] = -1;
        scores.top_logprobs.as<float>()[branch * scores.top_logprobs.stride[0] + i] = kNever;
    }
}

}  // namespace

void sample(const TensorRef& ids, const TensorRef& logits, const Draws& draws, const Adjustments& adjustments,
            const Scores& scores) {
    check::sample(ids, logits, draws, adjustments, scores);
    Pool::instance().run([&](PoolThread& thread) {
        Drawer& drawer = Drawer::of_thread(logits.shape[1]);
        thread.each(ids.shape[0], [&](std::int64_t branch) {
            const float* x = logits.as<float>() + at<std::int64_t>(draws.rows, branch) * logits.stride[0];
            std::int64_t token = drawer.look(x);
            if (token != kBadLogits && adjusts(adjustments, branch)) {
                float* changed = drawer.copy(x);
                adjust(changed, logits.shape[1], adjustments, branch);
                x = changed;
                token = drawer.look(x);
            }
            const std::int64_t number = draws.mask_of.given() ? at<std::int32_t>(draws.mask_of, branch) : -1;
            const std::int32_t* mask =
                number >= 0 ? draws.masks.as<std::int32_t>() + number * draws.masks.stride[0] : nullptr;
            if (token != kBadLogits && mask != nullptr) {
                token = drawer.confine(x, mask);
                token = token == kBadLogits ? kNothingLeft : token;
            }
            if (token >= 0 && at<float>(draws.temperature, branch) > 0) {
                token = drawer.draw(draws, branch);
            }
            if (token >= 0 && mask != nullptr) {
                token = drawer.id_of(token, mask);
            }
            ids.as<std::int64_t>()[branch] = token;
            const std::int64_t num = scores.counts.given() ? at<std::int32_t>(scores.counts, branch) : -1;
            if (num >= 0 && token < 0) {
                no_score(scores, branch);
            } else if (num >= 0) {
                if (mask != nullptr) {
                    drawer.look(x);
                }
                drawer.score(token, scores, branch, num);
            }
        });
    });
}

void score(const TensorRef& logits, const TensorRef& targets, const Scores& scores) {
    check::score(logits, targets, scores);
    Pool::instance().run([&](PoolThread& thread) {
        Drawer& drawer = Drawer::of_thread(logits.shape[1]);
        thread.each(logits.shape[0], [&](std::int64_t row) {
            const std::int64_t best = drawer.look(logits.as<float>() + row * logits.stride[0]);
            best == kBadLogits
                ? no_score(scores, row)
                : drawer.score(at<std::int64_t>(targets, row), scores, row, at<std::int32_t>(scores.counts, row));
        });
    });
}

std::vector<std::int64_t> likeliest(const float* x, std::int64_t count, std::int64_t num) {
    return Drawer::of_thread(count).likeliest(x, num);
}

}  // namespace octavo
