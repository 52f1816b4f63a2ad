// Which logits of some rows the front of a group asks other hosts for: all, or what its sampler needs of them.
//
// A branch that draws among its k likeliest tokens, or takes the likeliest, looks at no others (sample.h), but for
// those that its adjustments name. So a host sends the k likeliest of its tokens that are not named, and what the model
// says of those that are. The front has -inf in the place of all others, and samples as one process does, to the bit. A
// host's row that has NaN or +inf says so by its first entry.
//
// A branch that draws from all tokens, or whose log probabilities are wanted, also needs sums of weights, which are
// whole numbers (draw.h), so that each host can sum its own. What a host has sent is no more of its row. So a row is
// divided: the front has some tokens, and each host some others. What the front then asks all of them, and itself, is
// row_questions.h; what comes of it are the tokens that are drawn, and the sums that log probabilities are made of.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "octavo/host_links.h"
#include "octavo/sample.h"
#include "octavo/tensor.h"

namespace octavo {

struct SampledBranches;
class RowAskers;

class WantedLogits {
  public:
    WantedLogits() = default;  // all logits of any number of rows
    // What `sample` looks at of so many rows, or `score`. counts: those of the scores. targets i64 [r]: tokens that are
    // scored in place of what is sampled. drawn, totals: what either is to be given besides; they are written when the
    // logits are there.
    WantedLogits(std::int64_t rows, std::int64_t vocabulary, const Draws& draws, const Adjustments& adjustments,
                 const TensorRef& counts, const TensorRef& targets, const TensorRef& drawn, const TensorRef& totals);

    // Some of the rows.
    WantedLogits rows(std::int64_t first, std::int64_t count) const;
    bool fit(const Columns& logits) const;

    // As bytes for other hosts, and from those. False: they are no rows.
    std::vector<char> to_bytes() const;
    bool take_bytes(const std::vector<char>& bytes);

    // What a host sends of its columns: how many bytes, and the bytes. Its logits are changed by that.
    std::int64_t bytes_of(const Columns& logits, int host) const;
    void pack(const Columns& logits, int host, char* to) const;
    // In the front, before and when it comes. False: it is not what was asked for.
    void clear(const Columns& logits, int host) const;
    bool unpack(const Columns& logits, int host, const char* from) const;

    // Then, if there are questions: who asks them in the front, and what a host answers. False: nobody asks so.
    bool asks() const;
    std::unique_ptr<RowAskers> askers(const Columns& logits) const;
    bool answer(const Columns& logits, int host, const std::vector<char>& questions, std::vector<char>& answers) const;

  private:
    struct Row {
        std::int32_t count = 0;           // of the likeliest that may be drawn; 0: all logits
        std::int32_t top = 0;             // of the likeliest, whether they may be drawn or not
        std::int32_t asks = 0;            // whether there are questions about it
        std::vector<std::int32_t> named;  // sorted
        std::vector<std::uint32_t> mask;  // a bit per token; none: all may be drawn
    };

    static bool want(Row& row, const std::vector<std::int64_t>& here, std::int64_t vocabulary, const Draws& draws,
                     const TensorRef& counts, const TensorRef& targets, SampledBranches& branches);
    bool is_whole(std::int64_t row) const { return rows_.empty() || row_at(row).count == 0; }
    const Row& row_at(std::int64_t row) const { return rows_[static_cast<std::size_t>(row)]; }
    std::int64_t entries(std::int64_t row, const Span& span) const;
    std::vector<std::int64_t> places(const Columns& logits, const Span& span) const;
    template <typename Body>
    void each_row(const Columns& logits, const Span& span, const Body& body) const;
    void pack_row(std::int64_t row, float* x, const Span& span, char* to) const;
    bool unpack_row(std::int64_t row, float* x, const Span& span, const char* from) const;

    std::vector<Row> rows_;
    std::int64_t first_ = 0;                           // of the branches' rows
    std::shared_ptr<const SampledBranches> branches_;  // in the front
};

}  // namespace octavo
