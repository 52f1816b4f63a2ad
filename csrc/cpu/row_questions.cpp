#include "row_questions.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "drawer.h"

namespace octavo {
namespace {

template <typename T>
void append_each(std::vector<char>& bytes, const T* each, std::size_t count) {
    const auto* begin = reinterpret_cast<const char*>(each);
    bytes.insert(bytes.end(), begin, begin + count * sizeof(T));
}

template <typename T>
bool take_each(const char*& from, std::int64_t& left, T* each, std::int64_t count) {
    const auto size = static_cast<std::int64_t>(sizeof(T));
    if (count < 0 || count > left / size) {
        return false;
    }
    std::copy_n(from, count * size, reinterpret_cast<char*>(each));
    from += count * size;
    left -= count * size;
    return true;
}

template <typename T>
bool take_list(const char*& from, std::int64_t& left, std::vector<T>& list, std::int64_t count) {
    if (count < 0 || count > left / static_cast<std::int64_t>(sizeof(T))) {
        return false;
    }
    list.resize(static_cast<std::size_t>(count));
    return take_each(from, left, list.data(), count);
}

}  // namespace

void append(std::vector<char>& bytes, const Question& question) {
    append_each(bytes, &question.fixed, 1);
    append_each(bytes, question.known.data(), question.known.size());
}

void append(std::vector<char>& bytes, const Answer& answer) {
    const std::int32_t counts[] = {static_cast<std::int32_t>(answer.masses.size()),
                                   static_cast<std::int32_t>(answer.tokens.size())};
    append_each(bytes, counts, 2);
    append_each(bytes, answer.masses.data(), answer.masses.size());
    append_each(bytes, answer.tokens.data(), answer.tokens.size());
}

bool take(const char*& from, std::int64_t& left, Question& question) {
    return take_each(from, left, &question.fixed, 1) && take_list(from, left, question.known, question.fixed.known);
}

bool take(const char*& from, std::int64_t& left, Answer& answer) {
    std::int32_t counts[2];
    return take_each(from, left, counts, 2) && take_list(from, left, answer.masses, counts[0]) &&
           take_list(from, left, answer.tokens, counts[1]);
}

void leave_masked(float* x, const Span& span, const std::vector<std::uint32_t>& mask) {
    for (std::int64_t i = 0; i < span.count; ++i) {
        const std::int64_t id = span.first + i;
        x[i] = (mask[static_cast<std::size_t>(id / kMaskBits)] >> id % kMaskBits & 1) != 0 ? x[i] : kNever;
    }
}

bool answer_of(const Question& question, const float* x, const Span& span, const std::vector<std::uint32_t>& mask,
               Answer& answer) {
    const Question::Fixed& about = question.fixed;
    Drawer& drawer = Drawer::of_thread(span.count);
    const bool masked = about.masked != 0 && !mask.empty();
    if (masked || !question.known.empty()) {
        float* own = drawer.copy(x);
        if (masked) {
            leave_masked(own, span, mask);
        }
        for (const Entry& each : question.known) {
            if (!has(span, each.id)) {
                return false;
            }
            own[each.id - span.first] = each.logit;
        }
        x = own;
    }
    const bool sound = std::isfinite(about.highest) && std::isfinite(about.factor) && about.factor > 0;
    if (!sound || (span.count > 0 && !(x[draw_loops().best(x, span.count)] <= about.highest))) {
        return false;  // weights of higher ones have no room
    }
    drawer.part(x, span.count, about.highest, about.factor);
    const Kept kept = kept_from(about.kept, span.first);
    switch (about.kind) {
        case Question::kMass:
            answer.masses = {drawer.mass(kept)};
            return true;
        case Question::kMasses:
            if (about.buckets != kNearBuckets && about.buckets != kBuckets) {
                return false;
            }
            answer.masses = drawer.masses(about.buckets);
            return true;
        case Question::kBucket:
            for (const Candidate& each : drawer.in_bucket(about.buckets)) {
                answer.tokens.push_back({each.logit, static_cast<std::int32_t>(span.first + each.id)});
            }
            return true;
        case Question::kTokens:
            for (const Candidate& each : drawer.kept_ones(kept)) {
                answer.tokens.push_back({each.logit, static_cast<std::int32_t>(span.first + each.id)});
            }
            return true;
        case Question::kToken: {
            if (about.place >= drawer.mass(kept)) {
                return false;
            }
            const std::int64_t place = drawer.token_at(kept, about.place);
            answer.tokens = {{x[place], static_cast<std::int32_t>(span.first + place)}};
            return true;
        }
    }
    return false;
}

}  // namespace octavo
