#include "row_askers.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "adjust.h"
#include "octavo/pool.h"

namespace octavo {

namespace {

Candidate candidate_of(const Entry& each, const Question::Fixed& about) {
    return {each.logit, each.id, draw::weight_of(each.logit, about.highest, about.factor)};
}

}  // namespace

TensorRef SampledBranches::kept(const TensorRef& given) {
    TensorRef own = given;
    if (!given.given()) {
        return own;
    }
    const std::int64_t rows = given.ndim == 2 ? given.shape[0] : 1, row = given.shape[given.ndim - 1];
    const std::int64_t bytes = row * size_of(given.dtype);
    std::vector<char>& memory = memory_.emplace_back(static_cast<std::size_t>(rows * bytes + 1));
    for (std::int64_t i = 0; i < rows; ++i) {
        std::copy_n(given.as<char>() + i * given.stride[0] * size_of(given.dtype), bytes, memory.data() + i * bytes);
    }
    own.data = memory.data();
    own.stride[0] = given.ndim == 2 ? row : 1;
    return own;
}

Draws SampledBranches::kept(const Draws& given) {
    return {kept(given.rows),
            kept(given.temperature),
            kept(given.top_k),
            kept(given.top_p),
            kept(given.min_p),
            kept(given.filters),
            kept(given.seed),
            kept(given.branch),
            kept(given.index),
            {},
            {},
            {}};
}

Adjustments SampledBranches::kept(const Adjustments& given) {
    return {kept(given.repetition), kept(given.seen_ends),    kept(given.seen_ids),
            kept(given.seen_costs), kept(given.bias_ends),    kept(given.bias_ids),
            kept(given.biases),     kept(given.allowed_ends), kept(given.allowed_ids)};
}

RowAskers::RowAskers(const SampledBranches& branches, const std::vector<Asked>& asked, const Columns& logits,
                     std::vector<const Mask*> masks)
    : branches_(branches), logits_(logits), masks_(std::move(masks)), askers_(asked.size()) {
    for (const Span& span : *logits.spans) {
        all_.count = std::max(all_.count, span.first + span.count);
    }
    for (std::size_t i = 0; i < asked.size(); ++i) {
        askers_[i].asked = asked[i];
    }
    each([&](Asker& asker, Drawer& drawer) { begin(asker, drawer); });
}

template <typename Body>
void RowAskers::each(const Body& body) {
    Pool::instance().run([&](PoolThread& thread) {
        Drawer& drawer = Drawer::of_thread(all_.count);
        thread.each(static_cast<std::int64_t>(askers_.size()),
                    [&](std::int64_t i) { body(askers_[static_cast<std::size_t>(i)], drawer); });
    });
}

void RowAskers::begin(Asker& asker, Drawer& drawer) const {
    Question::Fixed& about = asker.question.fixed;
    const auto& [branch, row, total] = asker.asked;
    const Draws& draws = branches_.draws;
    look(asker, drawer);
    about.row = static_cast<std::int32_t>(row);
    about.masked = !total && !masks_[static_cast<std::size_t>(row)]->empty() ? 1 : 0;
    about.factor = draw::factor_of(total ? 1.0F : at<float>(draws.temperature, branch));
    about.kept = kAllKept;
    if (!total) {
        about.kept.least = draw::least_of(at<float>(draws.min_p, branch));
        about.kind = of_kept(asker);
        if (at<float>(draws.top_p, branch) < 1) {
            about.kind = Question::kMasses;
            about.buckets = kNearBuckets;
        }
    }
}

// What is asked of the tokens that are kept.
Question::Kind RowAskers::of_kept(const Asker& asker) const {
    const bool further = !asker.asked.total && further_of(branches_.draws, asker.asked.branch) != nullptr;
    return further ? Question::kTokens : Question::kMass;
}

// What is here of the asker's row, and the highest logit of all of it. It asks nothing if no token can be sampled.
void RowAskers::look(Asker& asker, Drawer& drawer) const {
    const auto& [branch, row, total] = asker.asked;
    const Mask& mask = *masks_[static_cast<std::size_t>(row)];
    const bool adjusted = adjusts(branches_.adjustments, branch), masked = !total && !mask.empty();
    const float* x = static_cast<const float*>(logits_.data) + row * logits_.stride;
    std::int64_t best = drawer.look(x);
    if (best >= 0 && (adjusted || masked)) {
        float* changed = drawer.copy(x);
        x = changed;
        if (adjusted) {
            adjust(changed, all_.count, branches_.adjustments, branch);
            best = drawer.look(changed);
        }
        if (best >= 0 && masked) {
            leave_masked(changed, all_, mask);
            best = drawer.look(changed);
        }
    }
    if (best < 0) {
        return;
    }
    asker.asks = true;
    asker.question.fixed.highest = x[best];
    asker.x = x + span(0).first;
    if (adjusted || masked) {
        asker.changed.assign(asker.x, asker.x + span(0).count);
        asker.x = asker.changed.data();
    }
    asker.told.resize(hosts());
    for (std::size_t host = 1; host < hosts(); ++host) {
        const std::int64_t first = span(host).first;
        for (const std::int64_t place : drawer.possible(x + first, span(host).count)) {
            asker.told[host].tokens.push_back({x[first + place], static_cast<std::int32_t>(first + place)});
            asker.told[host].logits.push_back(x[first + place]);
        }
    }
}

std::vector<char> RowAskers::questions() const {
    std::vector<char> bytes;
    for (const Asker& asker : askers_) {
        if (asker.asks) {
            append(bytes, asker.question);
        }
    }
    return bytes;
}

void RowAskers::answer_here() {
    each([&](Asker& asker, Drawer&) {
        asker.answers.assign(2 * hosts() - 1, {});
        Question question = asker.question;
        Question::Fixed& about = question.fixed;
        if (!asker.asks || about.kind == Question::kToken) {
            return;
        }
        answer_of(question, asker.x, span(0), {}, asker.answers[0]);
        for (std::size_t host = 1; host < hosts(); ++host) {
            const auto& [tokens, logits] = asker.told[host];
            const auto after = std::upper_bound(tokens.begin(), tokens.end(), asker.question.fixed.kept.id,
                                                [](std::int64_t id, const Entry& each) { return id < each.id; });
            about.kept.id = after - tokens.begin() - 1;  // by place among these
            Answer& answer = asker.answers[hosts() - 1 + host];
            answer_of(question, logits.data(), {0, static_cast<std::int64_t>(logits.size())}, {}, answer);
            for (Entry& each : answer.tokens) {
                each.id = tokens[static_cast<std::size_t>(each.id)].id;
            }
        }
    });
}

bool RowAskers::take(int host, const std::vector<char>& answers) {
    const char* from = answers.data();
    auto left = static_cast<std::int64_t>(answers.size());
    for (Asker& asker : askers_) {
        if (!asker.asks) {
            continue;
        }
        const Question::Fixed& about = asker.question.fixed;
        Answer& answer = asker.answers[static_cast<std::size_t>(host)];
        const std::size_t masses = about.kind == Question::kMass     ? 1
                                   : about.kind == Question::kMasses ? static_cast<std::size_t>(about.buckets) + 1
                                                                     : 0;
        const bool one = about.kind == Question::kToken && about.host == host;
        const bool listed = about.kind == Question::kBucket || about.kind == Question::kTokens;
        const auto fits = [&](const Entry& each) {
            return has(span(static_cast<std::size_t>(host)), each.id) && each.logit <= about.highest;
        };
        if (!octavo::take(from, left, answer) || answer.masses.size() != masses ||
            (!listed && answer.tokens.size() != (one ? 1U : 0U)) ||
            !std::all_of(answer.tokens.begin(), answer.tokens.end(), fits)) {
            return false;
        }
    }
    return left == 0;
}

void RowAskers::go_on() {
    each([&](Asker& asker, Drawer& drawer) {
        if (asker.asks) {
            go_on(asker, drawer);
        }
    });
}

void RowAskers::go_on(Asker& asker, Drawer& drawer) const {
    Question::Fixed& about = asker.question.fixed;
    switch (about.kind) {
        case Question::kMass:
            asker.masses.clear();
            for (const Answer& each : asker.answers) {
                asker.masses.push_back(each.masses[0]);
            }
            break;
        case Question::kMasses:
            take_buckets(asker);
            return;
        case Question::kBucket:
            take_candidates(asker);
            break;
        case Question::kTokens: {
            const std::vector<Candidate> kept = candidates_of(asker);
            asker.asks = false;
            if (!kept.empty()) {
                drawer.part(asker.x, span(0).count, about.highest, about.factor);
                const std::int64_t id = drawer.draw_among(kept, branches_.draws, asker.asked.branch);
                const auto drawn = std::find_if(kept.begin(), kept.end(), [id](auto& each) { return each.id == id; });
                asker.found = {drawn->logit, static_cast<std::int32_t>(id)};
            }
            return;
        }
        default:
            asker.found = asker.answers[static_cast<std::size_t>(about.host)].tokens[0];
            asker.asks = false;
            return;
    }
    if (asker.asked.total) {
        asker.asks = false;
    } else if (!asker.masses.empty()) {
        draw(asker, drawer);
    }
}

// Of all parts.
std::vector<Candidate> RowAskers::candidates_of(const Asker& asker) {
    std::vector<Candidate> found;
    for (const Answer& answer : asker.answers) {
        for (const Entry& each : answer.tokens) {
            found.push_back(candidate_of(each, asker.question.fixed));
        }
    }
    return found;
}

// In which bucket of all hosts' tokens the share of top-p ends.
void RowAskers::take_buckets(Asker& asker) const {
    Question::Fixed& about = asker.question.fixed;
    std::vector<std::uint64_t> sums(asker.answers[0].masses.size());
    for (const Answer& each : asker.answers) {
        std::transform(sums.begin(), sums.end(), each.masses.begin(), sums.begin(), std::plus<>());
    }
    const float top_p = at<float>(branches_.draws.top_p, asker.asked.branch);
    const std::uint64_t* masses = sums.data() + 1;  // sums[0]: of all
    asker.cut = cut_of(draw::share_of(top_p, sums[0]), masses, masses, about.buckets);
    if (asker.cut.bucket < about.buckets) {
        about.kind = Question::kBucket;
        about.buckets = asker.cut.bucket;
        asker.buckets = std::move(asker.answers);
    } else if (about.buckets < kBuckets) {
        about.buckets = kBuckets;
    } else {
        about.kind = of_kept(asker);
    }
}

// Where in that bucket.
void RowAskers::take_candidates(Asker& asker) const {
    Question::Fixed& about = asker.question.fixed;
    std::vector<Candidate> candidates = candidates_of(asker);
    end_at(about.kept, asker.cut, candidates, 0, [](std::uint64_t weight) { return weight; });
    about.kind = of_kept(asker);
    if (about.kind != Question::kMass || about.kept.least > 0) {
        return;
    }
    for (std::size_t part = 0; part < asker.answers.size(); ++part) {  // it need not be asked
        const auto first = asker.buckets[part].masses.begin() + 1;
        std::uint64_t mass = std::accumulate(first, first + asker.cut.bucket, std::uint64_t{0});
        for (const Entry& entry : asker.answers[part].tokens) {
            const Candidate each = candidate_of(entry, about);
            mass += is_kept(each, about.kept) ? each.weight : 0;
        }
        asker.masses.push_back(mass);
    }
}

// Who is at the place that a random number gives, if it is one of the front's own tokens; or whom to ask. By id, tokens
// that a host has told stand between its others, so they count where they stand, and it is told them.
void RowAskers::draw(Asker& asker, Drawer& drawer) const {
    Question::Fixed& about = asker.question.fixed;
    const std::uint64_t all = std::accumulate(asker.masses.begin(), asker.masses.end(), std::uint64_t{0});
    about.place = draw::place_of(chance_of(branches_.draws, asker.asked.branch).bits(0), all);
    std::size_t host = 0;
    for (std::uint64_t here = asker.masses[0]; host + 1 < hosts() && about.place >= here;) {
        about.place -= here;
        ++host;
        here = asker.masses[host] + asker.masses[hosts() - 1 + host];
    }
    if (host > 0) {
        about.kind = Question::kToken;
        about.host = static_cast<std::int32_t>(host);
        asker.question.known = asker.told[host].tokens;
        about.known = static_cast<std::int32_t>(asker.question.known.size());
        return;
    }
    const Kept kept = kept_from(about.kept, span(0).first);
    drawer.part(asker.x, span(0).count, about.highest, about.factor);
    drawer.mass(kept);
    asker.found.id = static_cast<std::int32_t>(span(0).first + drawer.token_at(kept, about.place));
    asker.asks = false;
}

void RowAskers::finish() const {
    for (const Asker& asker : askers_) {
        const auto& [branch, row, total] = asker.asked;
        if (total && !asker.masses.empty()) {
            branches_.totals.as<std::int64_t>()[branch] =
                static_cast<std::int64_t>(std::accumulate(asker.masses.begin(), asker.masses.end(), std::uint64_t{0}));
        } else if (asker.found.id != kNobody) {
            branches_.drawn.as<std::int64_t>()[branch] = asker.found.id;
            float& logit = static_cast<float*>(logits_.data)[row * logits_.stride + asker.found.id];
            logit = logit > kNever ? logit : asker.found.logit;
        }
    }
}

}  // namespace octavo
