#include "octavo/sample.h"

#include <limits>
#include <vector>

#include "adjust.h"
#include "drawer.h"
#include "octavo/pool.h"
#include "sample.h"

namespace octavo {
namespace {

// best: where the highest logit of x is.
std::int64_t chosen(Drawer& drawer, const float* x, const std::int32_t* mask, std::int64_t best, const Draws& draws,
                    std::int64_t branch) {
    std::int64_t place = best;
    if (mask != nullptr) {
        place = drawer.confine(x, mask);
        if (place < 0) {
            return kNothingLeft;
        }
    }
    if (at<float>(draws.temperature, branch) > 0) {
        place = drawer.draw(draws, branch);
    }
    return mask != nullptr ? drawer.id_of(place, mask) : place;
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
            const std::int64_t known = draws.drawn.given() ? at<std::int64_t>(draws.drawn, branch) : -1;
            const std::int64_t number = draws.mask_of.given() ? at<std::int32_t>(draws.mask_of, branch) : -1;
            const std::int32_t* mask =
                number >= 0 ? draws.masks.as<std::int32_t>() + number * draws.masks.stride[0] : nullptr;
            if (token != kBadLogits) {
                token = known >= 0 ? known : chosen(drawer, x, mask, token, draws, branch);
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
