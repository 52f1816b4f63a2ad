// Tokens of a row that were found one by one, where they are few: the likeliest, or those that other filters have left.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "candidates.h"
#include "octavo/draw.h"
#include "octavo/filters.h"
#include "sample.h"

namespace octavo {

struct Shortlist {
    std::vector<Candidate> tokens;

    // The `num` likeliest tokens of a row that are possible, in no order.
    void fill(const DrawLoops& loops, const DrawRow& row, std::size_t num) {
        const float* x = row.logits;
        tokens.clear();
        float least = kNever;
        for (std::int64_t id = loops.next_above(x, 0, row.count, least); id < row.count;
             id = loops.next_above(x, id + 1, row.count, least)) {
            tokens.push_back({x[id], id, 0});
            if (tokens.size() == 2 * num) {
                least = shorten(num);
            }
        }
        if (tokens.size() > num) {
            shorten(num);
        }
    }

    // The likeliest of them that have this share of their mass.
    void keep_share(const DrawRow& row, float top_p) {
        std::uint64_t mass = 0;
        for (Candidate& each : tokens) {
            each.weight = draw::weight_of(each.logit, row.highest, row.factor);
            mass += each.weight;
        }
        if (top_p < 1) {
            std::sort(tokens.begin(), tokens.end(), before);
            std::uint64_t missing = draw::share_of(top_p, mass);
            std::size_t kept = 0;
            while (kept < tokens.size() && (kept == 0 || missing > 0)) {
                const std::uint64_t weight = tokens[kept++].weight;
                missing -= std::min(missing, weight);
            }
            tokens.resize(kept);
        }
    }

    // One of them, by their weights. `further`: the parameters of further filters, if there are any.
    std::int64_t pick(const DrawRow& row, float least, const float* further, const filters::Chance& chance) {
        const auto gone = [least](const Candidate& each) { return static_cast<float>(each.weight) < least; };
        tokens.erase(std::remove_if(tokens.begin(), tokens.end(), gone), tokens.end());
        if (further != nullptr) {
            FilteredTokens filtered(tokens, row);
            filters::apply(filtered, further, chance);
        }
        std::sort(tokens.begin(), tokens.end(), [](auto& a, auto& b) { return a.id < b.id; });
        std::uint64_t mass = 0;
        for (const Candidate& each : tokens) {
            mass += each.weight;
        }
        std::uint64_t place = draw::place_of(chance.bits(0), mass);
        auto chosen = tokens.begin();
        while (place >= chosen->weight) {
            place -= chosen++->weight;
        }
        return chosen->id;
    }

  private:
    // Keeps the first `num` candidates; returns the logit of the last of them, which later tokens must exceed.
    float shorten(std::size_t num) {
        const auto last = tokens.begin() + static_cast<std::ptrdiff_t>(num) - 1;
        std::nth_element(tokens.begin(), last, tokens.end(), before);
        tokens.resize(num);
        return last->logit;
    }
};

}  // namespace octavo
