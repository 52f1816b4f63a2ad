// Tokens of a row that may be drawn, and where the first of them come to a part of the mass.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "octavo/draw.h"
#include "octavo/filters.h"
#include "sample.h"

namespace octavo {

constexpr std::int64_t kLastId = std::numeric_limits<std::int64_t>::max();
constexpr Kept kAllKept{kNever, kLastId, 0};

struct Candidate {
    float logit;
    std::int64_t id;
    std::uint64_t weight;
};

// The order in which filters keep tokens.
inline bool before(const Candidate& a, const Candidate& b) {
    return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
}

inline bool is_kept(const Candidate& each, const Kept& kept) {
    return static_cast<float>(each.weight) >= kept.least && !before({kept.logit, kept.id, 0}, each);
}

// The same of tokens whose ids are counted from `first` on.
inline Kept kept_from(const Kept& kept, std::int64_t first) { return {kept.logit, kept.id - first, kept.least}; }

// The bucket in which the first tokens come to a target, what of it is missing there, and the mass before. The bucket
// is the number of all where they do not.
struct Cut {
    int bucket = 0;
    std::uint64_t missing, mass = 0;
};

// amounts, masses: of each of `num` buckets.
template <typename Sum>
Cut cut_of(std::uint64_t target, const Sum* amounts, const std::uint64_t* masses, int num) {
    Cut cut{0, target, 0};
    while (cut.bucket < num && static_cast<std::uint64_t>(amounts[cut.bucket]) < cut.missing) {
        cut.missing -= static_cast<std::uint64_t>(amounts[cut.bucket]);
        cut.mass += masses[cut.bucket++];
    }
    return cut;
}

// Ends `kept`, of `mass`, where the candidates, which are those of the cut's bucket, come to what is missing by
// `amount` of a weight. Their order changes. Returns the mass that stays.
template <typename Amount>
std::uint64_t end_at(Kept& kept, const Cut& cut, std::vector<Candidate>& candidates, std::uint64_t mass,
                     Amount amount) {
    std::uint64_t missing = cut.missing, kept_mass = cut.mass;
    auto first = candidates.begin(), end = candidates.end();
    while (end - first > 1) {  // the last that is kept is in [first, end)
        const auto middle = first + (end - first) / 2;
        std::nth_element(first, middle, end, before);
        std::uint64_t sum = 0;
        for (auto each = first; each != middle; ++each) {
            sum += amount(each->weight);
        }
        if (sum >= missing) {
            end = middle;
        } else {
            missing -= sum;
            first = middle;
        }
    }
    if (first == end) {
        return mass;
    }
    kept.logit = first->logit;
    kept.id = first->id;
    for (auto each = candidates.begin(); each <= first; ++each) {
        kept_mass += each->weight;
    }
    return kept_mass;
}

// Candidates as filters see them.
class FilteredTokens {
  public:
    FilteredTokens(std::vector<Candidate>& candidates, const DrawRow& row) : candidates_(candidates) {
        for (const Candidate& each : candidates) {
            powers_.push_back(draw::power_of(each.logit, row.highest, row.factor));
        }
    }

    template <typename Amount>
    std::uint64_t sum(Amount amount) const {
        std::uint64_t total = 0;
        for (std::size_t i = 0; i < powers_.size(); ++i) {
            total += amount(powers_[i], static_cast<float>(candidates_[i].weight));
        }
        return total;
    }

    template <typename Amount>
    std::uint64_t largest(Amount amount) const {
        std::uint64_t most = 0;
        for (std::size_t i = 0; i < powers_.size(); ++i) {
            most = std::max(most, std::uint64_t{amount(powers_[i], static_cast<float>(candidates_[i].weight))});
        }
        return most;
    }

    void narrow(const filters::Band& band) {
        std::size_t num = 0;
        for (std::size_t i = 0; i < powers_.size(); ++i) {
            if (band.has(powers_[i])) {
                candidates_[num] = candidates_[i];
                powers_[num++] = powers_[i];
            }
        }
        candidates_.resize(num);
        powers_.resize(num);
    }

  private:
    std::vector<Candidate>& candidates_;
    std::vector<float> powers_;
};

}  // namespace octavo
