#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace octavo {
namespace {

constexpr std::int64_t kPiece = 512;  // floats of an activation that one thread takes at once; a multiple of kBlock
constexpr float kOut = -std::numeric_limits<float>::infinity();  // the rank of an expert that is not to be chosen

// exp of a number that is not above 0. That of libraries has other bits on other processors.
float small_exp(float x) {
    if (!(x > -80.0F)) {
        return 0.0F;
    }
    constexpr double kLog2 = 0.69314718055994530942;
    const double number = x, whole = std::floor(number / kLog2 + 0.5), rest = number - whole * kLog2;
    double sum = 1.0;
    for (int i = 12; i > 0; --i) {
        sum = 1.0 + sum * rest / i;
    }
    return static_cast<float>(std::ldexp(sum, static_cast<int>(whole)));
}

float sigmoid(float x) {
    const float e = small_exp(x < 0 ? x : -x);
    return x < 0 ? e / (1.0F + e) : 1.0F / (1.0F + e);
}

// How many columns so many pairs of tokens and experts take at most, each expert's beginning at kInputColumns.
std::int64_t most_columns(const Experts& experts, std::int64_t num_tokens) {
    const std::int64_t pairs = num_tokens * experts.top;
    const std::int64_t asked = std::min<std::int64_t>(pairs, static_cast<std::int64_t>(experts.down.size()));
    return pairs + asked * (kInputColumns - 1);
}

// Copies the rounded inputs of a column, `blocks` blocks.
template <typename Block>
void copy_column(const Block* from, std::int64_t column, Block* to, std::int64_t new_column, std::int64_t blocks) {
    const Block* source = from + input_at(column, blocks);
    Block* target = to + input_at(new_column, blocks);
    for (std::int64_t i = 0; i < blocks; ++i) {
        target[i * kInputColumns] = source[i * kInputColumns];
    }
}

// One product that all threads share.
void product(PoolThread& thread, int threads, const Weight& weight, const float* x, const Inputs& inputs,
             std::int64_t columns, float* y, const float* bias = nullptr) {
    run_linear(thread, threads,
               {weight, x, weight.cols, inputs.digits, inputs.bf16, columns, y, weight.rows, bias, false});
}

}  // namespace

ExpertPart expert_part(const Experts& experts, const LlamaShare& share) {
    if (share.team == nullptr) {
        return {{0, expert_inner(experts)}, {0, shared_inner(experts)}, share.hidden};
    }
    return {share.expert_inner, share.shared_inner, share.hidden};
}

void ExpertSpace::take(const Experts& e, const ExpertPart& part, std::int64_t hidden, std::int64_t num_tokens) {
    const std::int64_t pairs = num_tokens * e.top, found = most_columns(e, num_tokens);
    const std::int64_t inner = expert_inner(e), of_all = shared_inner(e), widest = std::max(hidden, inner);
    scores.take(2 * num_tokens * static_cast<std::int64_t>(e.down.size()));  // and ranks
    shares.take(pairs);
    chosen.take(pairs);
    columns.take(pairs);
    gathered.take(found * hidden);
    gate_up.take(std::max(found * 2 * part.inner.count, num_tokens * 2 * part.shared_inner.count));
    activated.take(found * inner);
    out.take(found * part.hidden.count);
    digits.take(num_blocks(found, widest));
    bf16.take(num_blocks(found, widest));
    if (of_all > 0) {
        shared.take(num_tokens * part.hidden.count);
        shared_scores.take(num_tokens);
        shared_activated.take(num_tokens * of_all);
        shared_digits.take(num_blocks(num_tokens, of_all));
        shared_bf16.take(num_blocks(num_tokens, of_all));
    }
    asked.reserve(std::max(asked.capacity(), e.down.size()));  // within a run nothing may throw
    next.reserve(std::max(next.capacity(), e.down.size()));
}

ExpertRun::ExpertRun(const Experts& experts, const ExpertPart& part, ExpertSpace& space, std::int64_t hidden,
                     std::int64_t num_tokens, const float* normed, const Inputs& rounded, float* states,
                     PoolThread& thread, int threads)
    : e_(experts),
      part_(part),
      space_(space),
      hidden_(hidden),
      num_tokens_(num_tokens),
      inner_(expert_inner(experts)),
      shared_inner_(shared_inner(experts)),
      normed_(normed),
      rounded_(rounded),
      states_(states),
      thread_(thread),
      threads_(threads),
      k_(kernels()),
      scores_(space.scores.take(0)),
      ranks_(scores_ + num_tokens * static_cast<std::int64_t>(experts.down.size())),
      shares_(space.shares.take(0)),
      gathered_(space.gathered.take(0)),
      gate_up_(space.gate_up.take(0)),
      activated_(space.activated.take(0)),
      out_(space.out.take(0)),
      chosen_(space.chosen.take(0)),
      columns_(space.columns.take(0)),
      grouped_{space.digits.take(0), space.bf16.take(0)},
      shared_{space.shared_digits.take(0), space.shared_bf16.take(0)} {}

// All ranks choose, each for itself: what they choose by is short.
void ExpertRun::make_states() {
    product(thread_, threads_, e_.router[0], normed_, rounded_, num_tokens_, scores_, e_.router_bias.as<float>());
    if (shared_inner_ > 0) {
        make_shared_states();
    }
    thread_.each(num_tokens_, [&](std::int64_t token) { choose(token); });
    thread_.each(1, [&](std::int64_t) { group(); });
    thread_.each(num_tokens_ * e_.top, [&](std::int64_t pair) { gather(pair); });
    multiply(e_.gate_up, e_.gate_up_bias, gathered_, hidden_, gate_up_);
    const std::int64_t own = part_.inner.count;
    const std::int64_t some = states_ == nullptr ? inputs_at_once(e_.down[0], own, kPiece) : kPiece;
    const std::int64_t pieces = (own + some - 1) / some;
    thread_.each(num_tokens_ * e_.top * pieces, [&](std::int64_t i) { activate(i / pieces, i % pieces * some, some); });
}

void ExpertRun::add_results(float* x) {
    thread_.each(states_ == nullptr ? 0 : num_tokens_ * e_.top, [&](std::int64_t pair) { take_states(pair); });
    multiply(e_.down, e_.down_bias, activated_, inner_, out_);
    if (shared_inner_ > 0) {
        multiply_shared();
    }
    thread_.each(num_tokens_, [&](std::int64_t token) { add(token, x + token * hidden_ + part_.hidden.first); });
}

// The experts of the highest rank, the first of equal ones, and their shares.
void ExpertRun::choose(std::int64_t token) {
    const auto count = static_cast<std::int64_t>(e_.down.size());
    float *scores = scores_ + token * count, *ranks = ranks_ + token * count;
    std::int64_t* chosen = chosen_ + token * e_.top;
    float* shares = shares_ + token * e_.top;
    const float largest = *std::max_element(scores, scores + count);
    double sum = 0.0, shared = 0.0;
    for (std::int64_t i = 0; i < count; ++i) {
        scores[i] = e_.sigmoid ? sigmoid(scores[i]) : small_exp(scores[i] - largest);
        sum += scores[i];
    }
    const double whole = e_.sigmoid ? 1.0 : sum;
    const float* correction = e_.correction.as<float>();
    for (std::int64_t i = 0; i < count; ++i) {
        ranks[i] = correction == nullptr ? scores[i] : static_cast<float>(scores[i] / whole) + correction[i];
    }
    if (e_.groups > 1) {
        leave_groups(ranks);
    }
    for (std::int64_t place = 0; place < e_.top; ++place) {
        std::int64_t best = -1;
        for (std::int64_t i = 0; i < count; ++i) {
            if (ranks[i] > (best < 0 ? kOut : ranks[best])) {
                best = i;
            }
        }
        best = std::max<std::int64_t>(best, 0);
        chosen[place] = best;
        shares[place] = scores[best];
        shared += scores[best];
        ranks[best] = kOut;
    }
    for (std::int64_t place = 0; place < e_.top; ++place) {
        shares[place] = static_cast<float>(e_.share_scale * (shares[place] / (e_.shares_sum_to_one ? shared : whole)));
    }
}

// Takes out all but the groups whose best expert, or best two together, have the highest ranks; of equal ones the first
// stay.
void ExpertRun::leave_groups(float* ranks) const {
    const std::int64_t size = static_cast<std::int64_t>(e_.down.size()) / e_.groups;
    float sums[kMostGroups];
    bool kept[kMostGroups] = {};
    for (std::int64_t group = 0; group < e_.groups; ++group) {
        float first = kOut, second = kOut;
        for (const float* rank = ranks + group * size; rank < ranks + (group + 1) * size; ++rank) {
            second = *rank > first ? first : *rank > second ? *rank : second;
            first = *rank > first ? *rank : first;
        }
        sums[group] = e_.best_per_group == 1 ? first : first + second;
    }
    for (std::int64_t place = 0; place < e_.top_groups; ++place) {
        std::int64_t best = -1;
        for (std::int64_t group = 0; group < e_.groups; ++group) {
            if (!kept[group] && (best < 0 || sums[group] > sums[best])) {
                best = group;
            }
        }
        kept[best] = true;
    }
    for (std::int64_t i = 0; i < e_.groups * size; ++i) {
        ranks[i] = kept[i / size] ? ranks[i] : kOut;
    }
}

// Gives each pair of a token and an expert its column.
void ExpertRun::group() {
    const std::int64_t pairs = num_tokens_ * e_.top;
    std::vector<std::int64_t>& next = space_.next;
    next.assign(e_.down.size(), 0);
    for (std::int64_t i = 0; i < pairs; ++i) {
        ++next[static_cast<std::size_t>(chosen_[i])];
    }
    std::int64_t first = 0;
    space_.asked.clear();
    for (std::size_t expert = 0; expert < next.size(); ++expert) {
        const std::int64_t count = next[expert];
        if (count > 0) {
            next[expert] = first;
            space_.asked.push_back({static_cast<std::int64_t>(expert), first, count});
            first += (count + kInputColumns - 1) / kInputColumns * kInputColumns;
        }
    }
    for (std::int64_t i = 0; i < pairs; ++i) {
        columns_[i] = next[static_cast<std::size_t>(chosen_[i])]++;
    }
}

void ExpertRun::gather(std::int64_t pair) {
    const std::int64_t token = pair / e_.top, column = columns_[pair], blocks = hidden_ / kBlock;
    switch (e_.gate_up[0].rounding) {
        case Rounding::k15Bits:
        case Rounding::k8Bits:
        case Rounding::kToken15Bits:
        case Rounding::kToken8Bits:
            return copy_column(rounded_.digits, token, grouped_.digits, column, blocks);
        case Rounding::kBf16:
            return copy_column(rounded_.bf16, token, grouped_.bf16, column, blocks);
        case Rounding::kNone:
            std::memcpy(gathered_ + column * hidden_, normed_ + token * hidden_,
                        static_cast<std::size_t>(hidden_) * sizeof(float));
    }
}

// All experts' products in one phase, each with its own columns. All matrices have one shape; an expert has the same
// number of them, one below the other.
void ExpertRun::multiply(const Stack& weights, const TensorRef& bias, const float* from, std::int64_t cols, float* to) {
    const auto parts = static_cast<std::int64_t>(weights.size() / e_.down.size());
    const std::int64_t rows = weights[0].rows;
    const auto asked_by = static_cast<std::int64_t>(space_.asked.size());
    const std::int64_t columns = num_tokens_ * e_.top / std::max<std::int64_t>(asked_by, 1);  // of one, on average
    const std::int64_t some = rows_at_once(weights[0], threads_, k_.division(weights[0], columns), asked_by * parts);
    const std::int64_t turns = (rows + some - 1) / some;
    thread_.each(asked_by * parts * turns, [&](std::int64_t i) {
        const AskedExpert& asked = space_.asked[static_cast<std::size_t>(i / turns / parts)];
        const std::int64_t part = i / turns % parts;
        const std::int64_t blocks = input_at(asked.first, cols / kBlock), first = i % turns * some;
        const LinearJob job{weights[static_cast<std::size_t>(asked.expert * parts + part)],
                            from + asked.first * cols,
                            cols,
                            grouped_.digits + blocks,
                            grouped_.bf16 + blocks,
                            asked.count,
                            to + asked.first * parts * rows + part * rows,
                            parts * rows,
                            bias.given() ? bias.as<float>() + asked.expert * bias.stride[0] + part * rows : nullptr,
                            false};
        const std::int64_t end = first + some < rows ? first + some : rows;
        k_.linear(job, first, end, thread_.scratch(k_.linear_scratch(job)));
    });
}

void ExpertRun::activate(std::int64_t pair, std::int64_t from, std::int64_t some) {
    const std::int64_t column = columns_[pair];
    const auto [first, own] = part_.inner;
    const std::int64_t count = own - from < some ? own - from : some;
    const float* gate = gate_up_ + column * 2 * own + from;
    float* to = (states_ == nullptr ? activated_ + column * inner_ : states_ + pair * inner_) + first + from;
    if (e_.alpha != 0) {
        k_.clamped_swiglu(gate, gate + own, e_.alpha, e_.limit, count, to);
    } else {
        k_.silu_mul(gate, gate + own, count, to);
    }
    if (states_ == nullptr) {
        round_inputs(e_.down[0], activated_ + column * inner_, column, from, count, grouped_);
    }
}

// What all ranks have made for a pair, in its column.
void ExpertRun::take_states(std::int64_t pair) {
    const std::int64_t column = columns_[pair];
    const float* state = states_ + pair * inner_;
    if (e_.down[0].rounding == Rounding::kNone) {
        std::memcpy(activated_ + column * inner_, state, static_cast<std::size_t>(inner_) * sizeof(float));
    } else {
        round_inputs(e_.down[0], state, column, 0, inner_, grouped_);
    }
}

// Of the expert that every token asks, with a share of its own if it has a gate.
void ExpertRun::make_shared_states() {
    if (!e_.shared_gate.empty()) {
        product(thread_, threads_, e_.shared_gate[0], normed_, rounded_, num_tokens_, space_.shared_scores.take(0));
    }
    const auto [first, own] = part_.shared_inner;
    float* half = gate_up_;
    for (const Weight& weight : e_.shared_gate_up) {
        run_linear(
            thread_, threads_,
            {weight, normed_, weight.cols, rounded_.digits, rounded_.bf16, num_tokens_, half, 2 * own, nullptr, false});
        half += weight.rows;
    }
    float* states = states_ == nullptr ? space_.shared_activated.take(0) : shared_states();
    thread_.each(num_tokens_, [&, first = first, own = own](std::int64_t token) {
        const float* gate = gate_up_ + token * 2 * own;
        float* to = states + token * shared_inner_;
        k_.silu_mul(gate, gate + own, own, to + first);
        if (states_ == nullptr) {
            round_inputs(e_.shared_down[0], to, token, 0, own, shared_);
        }
    });
}

void ExpertRun::multiply_shared() {
    const float* states = states_ == nullptr ? space_.shared_activated.take(0) : shared_states();
    thread_.each(states_ == nullptr ? 0 : num_tokens_, [&](std::int64_t token) {
        round_inputs(e_.shared_down[0], states + token * shared_inner_, token, 0, shared_inner_, shared_);
    });
    product(thread_, threads_, e_.shared_down[0], states, shared_, num_tokens_, space_.shared.take(0));
}

void ExpertRun::add(std::int64_t token, float* x) const {
    const std::int64_t own = part_.hidden.count;
    for (std::int64_t place = 0; place < e_.top; ++place) {
        const float share = shares_[token * e_.top + place];
        const float* out = out_ + columns_[token * e_.top + place] * own;
        for (std::int64_t i = 0; i < own; ++i) {
            x[i] += share * out[i];
        }
    }
    if (shared_inner_ > 0) {
        const float share = e_.shared_gate.empty() ? 1.0F : sigmoid(space_.shared_scores.take(0)[token]);
        const float* out = space_.shared.take(0) + token * own;
        for (std::int64_t i = 0; i < own; ++i) {
            x[i] += share * out[i];
        }
    }
}

}  // namespace octavo
