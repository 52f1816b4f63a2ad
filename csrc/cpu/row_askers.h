// The branches of a step that ask about rows of which other hosts have a part (row_questions.h), in the front.
#pragma once

#include <cstdint>
#include <vector>

#include "drawer.h"
#include "octavo/host_links.h"
#include "octavo/sample.h"
#include "row_questions.h"

namespace octavo {

// What a branch asks for: the total of a row's weights, for log probabilities, or a token that is drawn.
struct Asked {
    std::int64_t branch, row;
    bool total;
};

// The branches of `sample`, or of `score`, in memory of their own; drawn and totals are the caller's.
struct SampledBranches {
    SampledBranches() = default;
    SampledBranches(const SampledBranches&) = delete;
    SampledBranches& operator=(const SampledBranches&) = delete;

    TensorRef kept(const TensorRef& given);
    Draws kept(const Draws& given);  // but for masks
    Adjustments kept(const Adjustments& given);

    Draws draws;
    Adjustments adjustments;
    TensorRef drawn, totals;
    std::vector<Asked> asked;

  private:
    std::vector<std::vector<char>> memory_;
};

class RowAskers {
  public:
    using Mask = std::vector<std::uint32_t>;

    // asked: about rows of these logits, whose masks are `masks`.
    RowAskers(const SampledBranches& branches, const std::vector<Asked>& asked, const Columns& logits,
              std::vector<const Mask*> masks);

    // The next questions; none: all is known.
    std::vector<char> questions() const;
    void answer_here();
    // False: it cannot be what that host has.
    bool take(int host, const std::vector<char>& answers);
    void go_on();
    void finish() const;

  private:
    // Tokens that another host has sent, by id: with it, they are all of its span.
    struct Told {
        std::vector<Entry> tokens;
        std::vector<float> logits;
    };

    struct Asker {
        Asked asked;
        Question question;
        bool asks = false;
        const float* x = nullptr;           // the front's own tokens
        std::vector<float> changed;         // these, if they are not those of the model
        std::vector<Told> told;             // by host
        std::vector<Answer> answers;        // of all parts, to this question: of all hosts, and of what each has told
        std::vector<Answer> buckets;        // of all parts, if there was a question of masses
        std::vector<std::uint64_t> masses;  // of all parts: of the tokens that are kept
        Cut cut;
        Entry found;
    };

    std::size_t hosts() const { return logits_.spans->size(); }
    const Span& span(std::size_t host) const { return (*logits_.spans)[host]; }
    static std::vector<Candidate> candidates_of(const Asker& asker);
    void begin(Asker& asker, Drawer& drawer) const;
    Question::Kind of_kept(const Asker& asker) const;
    void look(Asker& asker, Drawer& drawer) const;
    void go_on(Asker& asker, Drawer& drawer) const;
    void take_buckets(Asker& asker) const;
    void take_candidates(Asker& asker) const;
    void draw(Asker& asker, Drawer& drawer) const;
    template <typename Body>
    void each(const Body& body);

    const SampledBranches& branches_;
    const Columns& logits_;
    Span all_;
    std::vector<const Mask*> masks_;
    std::vector<Asker> askers_;
};

}  // namespace octavo
