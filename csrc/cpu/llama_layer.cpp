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

void Llama::Run::add_product(std::size_t layer, LoraStackOf adapted, const Stack& stack, const float* x,
                             const TensorRef& bias) {
    const Adapted own{layer, adapted, share_.hidden.first};
    product(stack, x, bias, sum_ + share_.hidden.first, s_.hidden, !s_.sums_apart(), &own);
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
                         bool accumulate, const Adapted* adapted) {
    const bool adds = adapted != nullptr && !step_.loras.empty();
    LoraJob loras{};
    if (adds) {
        loras = {adapted->layer, adapted->stack, x,         stack.front().cols, y - adapted->first,
                 y_stride,       low_,           low_rows_, low_rank_};
        shrink_lora(thread_, threads_, step_, loras);
    }
    std::int64_t first = 0;
    for (const Weight& part : stack) {
        const float* added = bias.data != nullptr ? bias.as<float>() + first : nullptr;
        LinearJob job{part,        x,         part.cols, inputs_.digits, inputs_.bf16,
                      num_tokens_, y + first, y_stride,  added,          accumulate};
        job.low_row = adds ? adapted->first + first : 0;
        job.low_rank = adds && k_.adds_low_rank(part) ? low_rank_ : nullptr;
        run_linear(thread_, threads_, job);
        if (adds && job.low_rank == nullptr) {
            add_lora(thread_, threads_, step_, loras, job.low_row, job.low_row + part.rows);
        }
        first += part.rows;
    }
}

void Llama::Run::run_mlp(std::size_t index) {
    const LlamaLayer& layer = m_.layers_[index];
    norm(layer.mlp_norm, layer.gate_up);
    const Adapted adapted{index, &LoraLayer::gate_up, 0};
    product(layer.gate_up, normed_, layer.gate_up_bias, gate_up_, gate_up_row(), false, &adapted);
    activate(layer.down);
    add_product(index, &LoraLayer::down, layer.down, inner_, layer.down_bias);
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
