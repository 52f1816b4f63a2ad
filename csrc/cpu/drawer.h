// One branch at a time drawn from its logits, and scored, by the loops of an instruction set.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "candidates.h"
#include "kernels.h"
#include "octavo/draw.h"
#include "octavo/filters.h"
#include "octavo/sample.h"
#include "sample.h"
#include "shortlist.h"

namespace octavo {

constexpr std::int64_t kMostListed = 128;  // so many of the likeliest are found sooner than all tokens are weighed

inline const DrawLoops& draw_loops() {
#ifdef OCTAVO_X86_KERNELS
    if (kernels().isa >= Isa::kAvx512) {
        return *avx512_draw_loops();
    }
    if (kernels().isa >= Isa::kAvx2) {
        return *avx2_draw_loops();
    }
#endif
    return *generic_draw_loops();
}

template <typename T>
inline T at(const TensorRef& tensor, std::int64_t i) {
    return tensor.as<T>()[i];
}

inline filters::Chance chance_of(const Draws& draws, std::int64_t branch) {
    return {static_cast<std::uint64_t>(at<std::int64_t>(draws.seed, branch)),
            static_cast<std::uint32_t>(at<std::int64_t>(draws.branch, branch)),
            static_cast<std::uint32_t>(at<std::int64_t>(draws.index, branch))};
}

// The parameters of further filters, or nothing.
inline const float* further_of(const Draws& draws, std::int64_t branch) {
    const float* columns =
        draws.filters.given() ? draws.filters.as<float>() + branch * draws.filters.stride[0] : nullptr;
    return columns != nullptr && filters::any(columns) ? columns : nullptr;
}

// One branch at a time. What it keeps is memory.
class Drawer {
  public:
    // The caller's thread's: fresh memory in each step would cost page faults, which take longer than the draw.
    static Drawer& of_thread(std::int64_t num_tokens) {
        static thread_local Drawer drawer;
        drawer.loops_ = &draw_loops();
        drawer.num_tokens_ = num_tokens;
        drawer.spans_.resize(static_cast<std::size_t>((num_tokens + kSpan - 1) / kSpan));
        return drawer;
    }

    // Logits to be changed: a copy of x.
    float* copy(const float* x) {
        changed_.assign(x, x + num_tokens_);
        return changed_.data();
    }

    // Leaves of x what the mask allows, one beside the other: a draw asks for their order and for exact sums, so the
    // tokens between them are not missed, and costs what is left. Then `id_of` says which token is where.
    std::int64_t confine(const float* x, const std::int32_t* mask) {
        open_.resize(static_cast<std::size_t>(num_tokens_ + kSpare));
        row_.count = loops_->leave(x, num_tokens_, mask, open_.data());
        return row_.count == 0 ? kNothingLeft : look_at(open_.data());
    }

    // The token that stands at a place of what a mask has left.
    std::int64_t id_of(std::int64_t place, const std::int32_t* mask) const {
        std::int64_t begin = 0;
        for (int some = 0; (some = __builtin_popcount(word_of(mask, begin))) <= place; begin += kMaskBits) {
            place -= some;
        }
        std::uint32_t word = word_of(mask, begin);
        for (; place > 0; --place) {
            word &= word - 1;
        }
        return begin + __builtin_ctz(word);
    }

    // Where the highest logit is, or kBadLogits.
    std::int64_t look(const float* x) {
        row_.count = num_tokens_;
        return look_at(x);
    }

    // Where the `num` likeliest of x are that are possible, in no order.
    std::vector<std::int64_t> likeliest(const float* x, std::int64_t num) {
        row_.logits = x;
        row_.count = num_tokens_;
        listed_.fill(*loops_, row_, static_cast<std::size_t>(num));
        std::vector<std::int64_t> places;
        for (const Candidate& each : listed_.tokens) {
            places.push_back(each.id);
        }
        return places;
    }

    // After `look`.
    std::int64_t draw(const Draws& draws, std::int64_t branch) {
        row_.factor = draw::factor_of(at<float>(draws.temperature, branch));
        const float top_p = at<float>(draws.top_p, branch);
        const std::int64_t top_k = at<std::int32_t>(draws.top_k, branch);
        const bool by_count = top_k > 0 && top_k < row_.count, by_mass = top_p < 1;
        const float least = draw::least_of(at<float>(draws.min_p, branch));
        const filters::Chance chance = chance_of(draws, branch);
        const float* further = further_of(draws, branch);
        if (by_count && top_k <= kMostListed) {
            listed_.fill(*loops_, row_, static_cast<std::size_t>(top_k));
            listed_.keep_share(row_, top_p);
            return listed_.pick(row_, least, further, chance);
        }
        Kept kept = kAllKept;
        if (by_count || by_mass) {
            std::uint64_t left = sort_into(kNearBuckets);
            if (by_count) {
                left = cut(kept, static_cast<std::uint64_t>(top_k), left, [](std::uint64_t) { return 1; }, counts_);
            }
            if (by_mass) {
                cut(kept, draw::share_of(top_p, left), left, [](std::uint64_t weight) { return weight; }, masses_);
            }
        }
        if (further != nullptr) {
            kept_ones(kept);
            return listed_.pick(row_, least, further, chance);
        }
        kept.least = least;
        return token_at(kept, draw::place_of(chance.bits(0), mass(kept)));
    }

    // The next ones are of x [count], a part of a row whose highest logit may be elsewhere.
    void part(const float* x, std::int64_t count, float highest, float factor) {
        row_ = {x, count, highest, factor};
        spans_.resize(static_cast<std::size_t>((count + kSpan - 1) / kSpan));
    }

    std::uint64_t mass(const Kept& kept) { return loops_->sum_spans(row_, kept, spans_.data()); }

    // After `mass` of the same: who is at a place of it, by id.
    std::int64_t token_at(const Kept& kept, std::uint64_t place) const {
        std::size_t span = 0;
        while (place >= spans_[span]) {
            place -= spans_[span++];
        }
        std::int64_t id = static_cast<std::int64_t>(span) * kSpan;
        for (;; ++id) {
            const Candidate each{row_.logits[id], id, draw::weight_of(row_.logits[id], row_.highest, row_.factor)};
            const bool stays = is_kept(each, kept);
            if (stays && place < each.weight) {
                return id;
            }
            place -= stays ? each.weight : 0;
        }
    }

    // The mass of all, and then that of each of `num` buckets.
    std::vector<std::uint64_t> masses(int num) {
        std::vector<std::uint64_t> found(1, sort_into(num));
        found.insert(found.end(), masses_, masses_ + num);
        return found;
    }

    // Its tokens in a bucket.
    const std::vector<Candidate>& in_bucket(int bucket) {
        const auto below = [&](double power) {
            const double reach = power / static_cast<double>(row_.factor);
            return static_cast<float>(static_cast<double>(row_.highest) - reach);
        };
        const float low = std::nextafter(below((bucket + 1) / 16.0 * 1.00001), kNever);  // a bit more than it has
        const float high = std::nextafter(below(bucket / 16.0 * 0.99999), -kNever);
        listed_.tokens.clear();
        const float* x = row_.logits;
        for (std::int64_t id = loops_->next_within(x, 0, row_.count, low, high); id < row_.count;
             id = loops_->next_within(x, id + 1, row_.count, low, high)) {
            if (bucket_of(draw::power_of(x[id], row_.highest, row_.factor)) == bucket) {
                listed_.tokens.push_back({x[id], id, 0});
            }
        }
        return listed_.tokens;
    }

    // Its tokens that are kept and weigh something.
    const std::vector<Candidate>& kept_ones(const Kept& kept) {
        mass(kept);
        listed_.tokens.clear();
        for (std::int64_t id = 0; id < row_.count; ++id) {
            if (spans_[static_cast<std::size_t>(id / kSpan)] == 0) {
                id += kSpan - 1;
                continue;
            }
            const Candidate each{row_.logits[id], id, draw::weight_of(row_.logits[id], row_.highest, row_.factor)};
            if (each.weight > 0 && is_kept(each, kept)) {
                listed_.tokens.push_back(each);
            }
        }
        return listed_.tokens;
    }

    // After `part`, of a whole row: what `draw` does with the tokens that are kept.
    std::int64_t draw_among(const std::vector<Candidate>& kept, const Draws& draws, std::int64_t branch) {
        listed_.tokens = kept;
        return listed_.pick(row_, 0, further_of(draws, branch), chance_of(draws, branch));
    }

    // Where those of x [count] are that are possible.
    std::vector<std::int64_t> possible(const float* x, std::int64_t count) const {
        std::vector<std::int64_t> places;
        for (std::int64_t place = loops_->next_above(x, 0, count, kNever); place < count;
             place = loops_->next_above(x, place + 1, count, kNever)) {
            places.push_back(place);
        }
        return places;
    }

    // After `look`: the log probability of `token`, and the likeliest.
    void score(std::int64_t token, const Scores& scores, std::int64_t branch, std::int64_t num) {
        row_.factor = draw::factor_of(1);
        const std::int64_t given = scores.totals.given() ? at<std::int64_t>(scores.totals, branch) : 0;
        const std::uint64_t total = given > 0 ? static_cast<std::uint64_t>(given) : mass(kAllKept);
        const double sum = std::log(std::ldexp(static_cast<double>(total), -draw::kWeightBits));
        const auto logprob = [&](std::int64_t id) {
            return static_cast<float>(static_cast<double>(row_.logits[id]) - static_cast<double>(row_.highest) - sum);
        };
        scores.logprobs.as<float>()[branch] = logprob(token);
        const std::vector<std::int64_t>& listed = top(num);
        for (std::int64_t i = 0; i < scores.top_ids.shape[1]; ++i) {
            const bool there = i < static_cast<std::int64_t>(listed.size());
            const std::int64_t id = there ? listed[static_cast<std::size_t>(i)] : -1;
            scores.top_ids.as<std::int64_t>()[branch * scores.top_ids.stride[0] + i] = id;
            scores.top_logprobs.as<float>()[branch * scores.top_logprobs.stride[0] + i] = there ? logprob(id) : kNever;
        }
    }

  private:
    std::uint32_t word_of(const std::int32_t* mask, std::int64_t begin) const {
        const auto word = static_cast<std::uint32_t>(mask[begin / kMaskBits]);
        return num_tokens_ - begin < kMaskBits ? word & ~(~0U << (num_tokens_ - begin)) : word;
    }

    std::int64_t look_at(const float* x) {
        row_.logits = x;
        const std::int64_t best = loops_->best(x, row_.count);
        row_.highest = x[best];
        return std::isfinite(row_.highest) ? best : kBadLogits;
    }

    std::uint64_t sort_into(int num) {
        num_buckets_ = num;
        buckets_.resize(static_cast<std::size_t>(row_.count));
        return loops_->histogram(row_, num, buckets_.data(), counts_, masses_);
    }

    // Ends `kept`, of `mass`, where its first tokens come to `target` by `amount` of a weight; `amounts`: the sums of
    // each bucket. Returns the mass that stays.
    template <typename Amount, typename Sum>
    std::uint64_t cut(Kept& kept, std::uint64_t target, std::uint64_t mass, Amount amount, const Sum* amounts) {
        Cut found = cut_of(target, amounts, masses_, num_buckets_);
        if (found.bucket == num_buckets_ && num_buckets_ < kBuckets) {
            sort_into(kBuckets);
            found = cut_of(target, amounts, masses_, num_buckets_);
        }
        if (found.bucket == kBuckets) {
            return mass;
        }
        collect(found.bucket, kept);
        return end_at(kept, found, listed_.tokens, mass, amount);
    }

    // The kept tokens of a bucket.
    void collect(int bucket, const Kept& kept) {
        listed_.tokens.clear();
        const std::uint16_t* buckets = buckets_.data();
        for (std::int64_t id = loops_->next_in(buckets, 0, row_.count, bucket); id < row_.count;
             id = loops_->next_in(buckets, id + 1, row_.count, bucket)) {
            const Candidate each{row_.logits[id], id, draw::weight_of(row_.logits[id], row_.highest, row_.factor)};
            if (!before({kept.logit, kept.id, 0}, each)) {
                listed_.tokens.push_back(each);
            }
        }
    }

    // The `num` likeliest tokens, as long as they are possible.
    const std::vector<std::int64_t>& top(std::int64_t num) {
        top_.clear();
        const float* x = row_.logits;
        float least = kNever;
        for (std::int64_t id = num > 0 ? loops_->next_above(x, 0, row_.count, least) : row_.count; id < row_.count;
             id = loops_->next_above(x, id + 1, row_.count, least)) {
            if (static_cast<std::int64_t>(top_.size()) == num) {
                top_.pop_back();
            }
            top_.insert(std::upper_bound(top_.begin(), top_.end(), id,
                                         [x](std::int64_t a, std::int64_t b) { return x[a] > x[b]; }),
                        id);
            least = static_cast<std::int64_t>(top_.size()) == num ? x[top_.back()] : kNever;
        }
        return top_;
    }

    const DrawLoops* loops_ = nullptr;
    std::int64_t num_tokens_ = 0;  // of the vocabulary
    DrawRow row_{};                // all of them, or those that a mask has left
    std::vector<float> changed_, open_;
    std::vector<std::uint64_t> spans_;
    std::vector<std::uint16_t> buckets_;
    int num_buckets_ = 0;  // that are counted
    std::int32_t counts_[kBuckets];
    std::uint64_t masses_[kBuckets];
    Shortlist listed_;
    std::vector<std::int64_t> top_;
};

}  // namespace octavo
