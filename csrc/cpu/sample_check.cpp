#include <limits>

#include "octavo/filters.h"
#include "octavo/sample.h"

namespace octavo::check {
namespace {

template <typename T>
void expect_range(const TensorRef& tensor, const char* name, T low, T high) {
    for (std::int64_t i = 0; i < tensor.size(); ++i) {
        const T value = tensor.as<T>()[i];
        require(value >= low && value <= high, name, "is out of range");
    }
}

// A list per branch: ends [branches + 1] into ids of `low` to `vocabulary`. Returns how long it is.
std::int64_t expect_list(const TensorRef& ends, const char* ends_name, const TensorRef& ids, const char* ids_name,
                         std::int64_t branches, std::int64_t low, std::int64_t vocabulary) {
    if (!ends.given()) {
        return 0;
    }
    expect(ends, ends_name, {branches + 1}, DType::kI64);
    expect(ids, ids_name, {kAny}, DType::kI64);
    const auto* places = ends.as<std::int64_t>();
    require(places[0] == 0 && places[branches] == ids.shape[0], ends_name, "does not run from 0 to the list's end");
    for (std::int64_t i = 0; i < branches; ++i) {
        require(places[i] <= places[i + 1], ends_name, "falls");
    }
    expect_range<std::int64_t>(ids, ids_name, low, vocabulary - 1);
    return ids.shape[0];
}

void expect_scores(const Scores& scores, std::int64_t branches) {
    expect(scores.counts, "counts", {branches}, DType::kI32);
    expect(scores.logprobs, "logprobs", {branches}, DType::kF32);
    expect(scores.top_ids, "top_ids", {branches, kAny}, DType::kI64);
    expect(scores.top_logprobs, "top_logprobs", {branches, scores.top_ids.shape[1]}, DType::kF32);
    expect_range<std::int32_t>(scores.counts, "counts", -1, static_cast<std::int32_t>(scores.top_ids.shape[1]));
    if (scores.totals.given()) {
        expect(scores.totals, "totals", {branches}, DType::kI64);
        expect_range<std::int64_t>(scores.totals, "totals", 0, std::numeric_limits<std::int64_t>::max());
    }
}

// That nothing is written where something is read, or written twice.
void expect_outputs_apart(const Scores& to, std::initializer_list<const TensorRef*> inputs) {
    expect_apart(to.logprobs, "logprobs", inputs);
    expect_apart(to.logprobs, "logprobs", {&to.counts, &to.totals, &to.top_ids, &to.top_logprobs});
    expect_apart(to.top_ids, "top_ids", inputs);
    expect_apart(to.top_ids, "top_ids", {&to.counts, &to.totals, &to.top_logprobs});
    expect_apart(to.top_logprobs, "top_logprobs", inputs);
    expect_apart(to.top_logprobs, "top_logprobs", {&to.counts, &to.totals});
}

void expect_columns(std::int64_t columns) {
    require(columns > 0 && columns < std::int64_t{1} << 23, "logits",
            "have no columns, or more than sums of weights have room for");
}

void expect_branches(std::int64_t branches, std::int64_t rows, std::int64_t vocabulary, const Draws& draws,
                     const Adjustments& adjustments) {
    expect(draws.rows, "rows", {branches}, DType::kI64);
    expect(draws.temperature, "temperature", {branches}, DType::kF32);
    expect(draws.top_k, "top_k", {branches}, DType::kI32);
    expect(draws.top_p, "top_p", {branches}, DType::kF32);
    expect(draws.min_p, "min_p", {branches}, DType::kF32);
    if (draws.filters.given()) {
        expect(draws.filters, "filters", {branches, filters::kColumns}, DType::kF32);
        expect_range<float>(draws.filters, "filters", 0, 1);
    }
    if (draws.drawn.given()) {
        expect(draws.drawn, "drawn", {branches}, DType::kI64);
        expect_range<std::int64_t>(draws.drawn, "drawn", -1, vocabulary - 1);
    }
    if (draws.mask_of.given()) {
        expect(draws.mask_of, "mask_of", {branches}, DType::kI32);
        expect(draws.masks, "masks", {kAny, (vocabulary + 31) / 32}, DType::kI32);
        const auto last = static_cast<std::int32_t>(draws.masks.shape[0] - 1);
        expect_range<std::int32_t>(draws.mask_of, "mask_of", -1, last);
    }
    expect(draws.seed, "seed", {branches}, DType::kI64);
    expect(draws.branch, "branch", {branches}, DType::kI64);
    expect(draws.index, "index", {branches}, DType::kI64);
    expect_range<std::int64_t>(draws.rows, "rows", 0, rows - 1);
    expect_range<float>(draws.temperature, "temperature", 0, 3e38F);
    expect_range<std::int32_t>(draws.top_k, "top_k", 0, 2147483647);
    expect_range<float>(draws.top_p, "top_p", 0, 1);
    expect_range<float>(draws.min_p, "min_p", 0, 1);
    const Adjustments& by = adjustments;
    const std::int64_t seen = expect_list(by.seen_ends, "seen_ends", by.seen_ids, "seen_ids", branches, 0, vocabulary);
    const std::int64_t bias = expect_list(by.bias_ends, "bias_ends", by.bias_ids, "bias_ids", branches, 0, vocabulary);
    expect_list(by.allowed_ends, "allowed_ends", by.allowed_ids, "allowed_ids", branches, -1, vocabulary);
    if (by.seen_ends.given()) {
        expect(by.seen_costs, "seen_costs", {seen}, DType::kF32);
        expect(by.repetition, "repetition", {branches}, DType::kF32);
    }
    if (by.bias_ends.given()) {
        expect(by.biases, "biases", {bias}, DType::kF32);
    }
}

// A result of a branch each, apart from all that is read.
void expect_apart_from(const TensorRef& out, const char* name, const Draws& d, const Adjustments& by) {
    expect_apart(
        out, name,
        {&d.rows,      &d.temperature, &d.top_k,      &d.top_p,     &d.min_p,   &d.filters,       &d.mask_of,
         &d.masks,     &d.drawn,       &d.seed,       &d.branch,    &d.index,   &by.repetition,   &by.seen_ends,
         &by.seen_ids, &by.seen_costs, &by.bias_ends, &by.bias_ids, &by.biases, &by.allowed_ends, &by.allowed_ids});
}

void expect_logits(const TensorRef& logits) {
    expect(logits, "logits", {kAny, kAny}, DType::kF32);
    expect_columns(logits.shape[1]);
}

}  // namespace

void sample(const TensorRef& ids, const TensorRef& logits, const Draws& draws, const Adjustments& adjustments,
            const Scores& scores) {
    expect_logits(logits);
    expect(ids, "ids", {kAny}, DType::kI64);
    expect_branches(ids.shape[0], logits.shape[0], logits.shape[1], draws, adjustments);
    expect_apart(ids, "ids", {&logits});
    expect_apart_from(ids, "ids", draws, adjustments);
    if (scores.counts.given()) {
        expect_scores(scores, ids.shape[0]);
        expect_apart(ids, "ids",
                     {&scores.counts, &scores.totals, &scores.logprobs, &scores.top_ids, &scores.top_logprobs});
        expect_outputs_apart(scores, {&logits});
        expect_apart_from(scores.logprobs, "logprobs", draws, adjustments);
        expect_apart_from(scores.top_ids, "top_ids", draws, adjustments);
        expect_apart_from(scores.top_logprobs, "top_logprobs", draws, adjustments);
    }
}

void score(const TensorRef& logits, const TensorRef& targets, const Scores& scores) {
    expect_logits(logits);
    expect(targets, "targets", {logits.shape[0]}, DType::kI64);
    expect_range<std::int64_t>(targets, "targets", 0, logits.shape[1] - 1);
    expect_scores(scores, logits.shape[0]);
    expect_range<std::int32_t>(scores.counts, "counts", 0, 2147483647);
    expect_outputs_apart(scores, {&logits, &targets});
}

void wanted(std::int64_t rows, std::int64_t vocabulary, const Draws& draws, const Adjustments& adjustments,
            const TensorRef& counts, const TensorRef& targets, const TensorRef& drawn, const TensorRef& totals) {
    require(rows >= 0 && rows <= std::int64_t{1} << 30, "num_rows", "are not those of a step");
    expect_columns(vocabulary);
    expect(draws.rows, "rows", {kAny}, DType::kI64);
    const std::int64_t branches = draws.rows.shape[0];
    expect_branches(branches, rows, vocabulary, draws, adjustments);
    if (counts.given()) {
        expect(counts, "counts", {branches}, DType::kI32);
    }
    if (targets.given()) {
        expect(targets, "targets", {branches}, DType::kI64);
        expect_range<std::int64_t>(targets, "targets", 0, vocabulary - 1);
    }
    expect(drawn, "drawn", {branches}, DType::kI64);
    expect(totals, "totals", {branches}, DType::kI64);
    expect_apart(drawn, "drawn", {&totals, &counts, &targets});
    expect_apart(totals, "totals", {&counts, &targets});
    expect_apart_from(drawn, "drawn", draws, adjustments);
    expect_apart_from(totals, "totals", draws, adjustments);
}

}  // namespace octavo::check
