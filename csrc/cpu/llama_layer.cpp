// What layers of all kinds have: norms, products and sums, MLPs and experts.
#include <algorithm>

#include "activations.h"
#include "llama_run.h"

namespace octavo {

void Llama::Run::norm(const TensorRef& weight, const Stack& next, bool all_come) {
    const TensorRef* late = late_;
    late_ = nullptr;
    const auto token = [&](std::int64_t t) {
        float* x = x_ + t * s_.hidden;
        if (late != nullptr) {
            add_apart(t, *late);
        }
        if (weight.given()) {
            k_.rms_norm(x, weight.as<float>(), s_.eps, s_.hidden, normed_ + t * s_.hidden);
        }
        round_inputs(next.front(), weight.given() ? normed_ + t * s_.hidden : x, t, 0, s_.hidden, inputs_);
    };
    prepare(s_.hidden, token, all_come);
    normed_ = weight.given() ? normed_ : x_;
}

void Llama::Run::add_product(const Stack& stack, const float* x, const TensorRef& bias) {
    product(stack, x, bias, sum_ + share_.hidden.first, s_.hidden, !s_.sums_apart());
}

void Llama::Run::end_sum(const TensorRef& norm) {
    meet({{sum_, num_tokens_, s_.hidden, &share_.host_hidden}});
    if (s_.sums_apart() && share_.team == nullptr) {
        late_ = &norm;
    } else if (s_.sums_apart()) {
        const std::int64_t rank = share_.team->rank_in_stage(), ranks = share_.team->stage_size();
        const std::int64_t first = num_tokens_ * rank / ranks, end = num_tokens_ * (rank + 1) / ranks;
        each(end - first, [&](std::int64_t i) { add_apart(first + i, norm); });
        meet();
    }
}

void Llama::Run::add_apart(std::int64_t t, const TensorRef& norm) {
    float *x = x_ + t * s_.hidden, *sum = apart_ + t * s_.hidden;
    if (norm.given()) {
        k_.rms_norm(sum, norm.as<float>(), s_.eps, s_.hidden, sum);
    }
    for (std::int64_t i = 0; i < s_.hidden; ++i) {
        x[i] += sum[i] * s_.sum_scale;
    }
}

void Llama::Run::round(const Stack& stack, const float* x) {
    const Weight& next = stack.front();
    if (next.rounding != Rounding::kNone) {
        prepare(next.cols, [&](std::int64_t t) { round_inputs(next, x + t * next.cols, t, 0, next.cols, inputs_); });
    }
}

void Llama::Run::product(const Stack& stack, const float* x, const TensorRef& bias, float* y, std::int64_t y_stride,
                         bool accumulate) {
    std::int64_t first = 0;
    for (const Weight& part : stack) {
        const float* added = bias.data != nullptr ? bias.as<float>() + first : nullptr;
        run_linear(
            thread_, threads_,
            {part, x, part.cols, inputs_.digits, inputs_.bf16, num_tokens_, y + first, y_stride, added, accumulate});
        first += part.rows;
    }
}

void Llama::Run::adapt(std::size_t layer, LoraStackOf stack, const float* x, std::int64_t cols, float* y,
                       std::int64_t rows) {
    add_lora(thread_, threads_, step_, {layer, stack, x, cols, y, rows, low_, low_rows_});
}

void Llama::Run::run_mlp(std::size_t index) {
    const LlamaLayer& layer = m_.layers_[index];
    norm(layer.mlp_norm, layer.gate_up);
    product(layer.gate_up, normed_, layer.gate_up_bias, gate_up_, gate_up_row(), false);
    adapt(index, &LoraLayer::gate_up, normed_, s_.hidden, gate_up_, gate_up_row());
    activate(layer.down);
    add_product(layer.down, inner_, layer.down_bias);
    adapt(index, &LoraLayer::down, inner_, s_.inner, sum_, s_.hidden);
    end_sum(layer.output_norm);
}

void Llama::Run::activate(const Stack& next) {
    const auto [start, size] = share_.inner;
    const std::int64_t piece = share_.team == nullptr ? inputs_at_once(next.front(), size, kPiece) : kPiece;
    const std::int64_t pieces = (size + piece - 1) / piece;
    each(num_tokens_ * pieces, [&, first = start, own = size](std::int64_t i) {
        const std::int64_t t = i / pieces, from = i % pieces * piece;
        const std::int64_t count = own - from < piece ? own - from : piece;
        const float* gate = gate_up_ + t * gate_up_row() + from;
        (s_.gelu ? gelu_mul : k_.silu_mul)(gate, gate + own, count, inner_ + t * s_.inner + first + from);
        if (share_.team == nullptr) {
            round_inputs(next.front(), inner_ + t * s_.inner, t, from, count, inputs_);
        }
    });
    if (share_.team != nullptr) {
        meet({{inner_, num_tokens_, s_.inner, &share_.host_inner}});
        round(next, inner_);
    }
}

void Llama::Run::ask_experts(const LlamaLayer& layer) {
    const Experts& experts = layer.experts;
    norm(layer.mlp_norm, experts.gate_up);
    ExpertRun run(experts, expert_part(experts, share_), m_.space_->experts, s_.hidden, num_tokens_, normed_, inputs_,
                  share_.team != nullptr ? inner_ : nullptr, thread_, threads_);
    run.make_states();
    meet({{inner_, num_tokens_ * experts.top, expert_inner(experts), &share_.host_expert_inner},
          {run.shared_states(), num_tokens_, shared_inner(experts), &share_.host_shared_inner}});
    run.add_results(x_);
    meet({{x_, num_tokens_, s_.hidden, &share_.host_hidden}});
}

}  // namespace octavo
