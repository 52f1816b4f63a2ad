// What the front of a group asks of the parts of a row: its own one, and those of other hosts. See wanted_logits.h.
//
// A log probability needs the mass of all tokens. A draw needs the mass of those that are kept, and then, from the host
// where the drawn place is, who is there. Where top-p keeps some, there are two questions before: the mass of each
// bucket of tokens (sample.h), and who is in the one where the share ends. Further filters need all that are kept.
// Bytes are those of a machine of the same kind, as in all that hosts tell each other.
#pragma once

#include <cstdint>
#include <vector>

#include "octavo/host_links.h"
#include "sample.h"

namespace octavo {

constexpr std::int32_t kNobody = -1;

// A token, and what the model says of it.
struct Entry {
    float logit = kNever;
    std::int32_t id = kNobody;
};

inline bool has(const Span& span, std::int64_t id) { return id >= span.first && id < span.first + span.count; }

struct Question {
    enum Kind : std::int32_t { kMass, kMasses, kBucket, kToken, kTokens };

    struct Fixed {
        std::uint64_t place = 0;  // kToken: of the mass of its kept ones
        Kept kept{kNever, 0, 0};  // kMass, kToken, kTokens
        std::int32_t kind = kMass;
        std::int32_t row = 0;
        std::int32_t masked = 0;           // whether it is about what the row's mask leaves
        float highest = 0, factor = 0;     // of the whole row, and of power_of (draw.h)
        std::int32_t buckets = 0;          // kMasses: of how many; kBucket: which
        std::int32_t host = 0, known = 0;  // kToken: whose it is, and how many of that host's tokens the front has
    } fixed;
    std::vector<Entry> known;
};

struct Answer {
    std::vector<std::uint64_t> masses;
    std::vector<Entry> tokens;
};

// False, here and below: it is nothing that can be.
void append(std::vector<char>& bytes, const Question& question);
void append(std::vector<char>& bytes, const Answer& answer);
bool take(const char*& from, std::int64_t& left, Question& question);
bool take(const char*& from, std::int64_t& left, Answer& answer);

// Takes out of x, which are the tokens of `span`, those without a bit in a mask.
void leave_masked(float* x, const Span& span, const std::vector<std::uint32_t>& mask);

// Of x, which are those tokens of `span` that are here.
bool answer_of(const Question& question, const float* x, const Span& span, const std::vector<std::uint32_t>& mask,
               Answer& answer);

}  // namespace octavo
