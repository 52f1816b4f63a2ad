// Whether the tensors of a layer's experts fit together.
#include <cmath>

#include "experts.h"

namespace octavo {
namespace {

void expect_bias(const TensorRef& bias, const char* name, std::initializer_list<std::int64_t> shape) {
    if (bias.given()) {
        expect(bias, name, shape, DType::kF32);
    }
}

void expect_one(const Stack& stack, const char* name, std::int64_t rows, std::int64_t cols) {
    require(stack.size() == 1 && stack[0].data != nullptr && stack[0].rows == rows && stack[0].cols == cols, name,
            "has another shape");
}

}  // namespace

void check_experts(const Experts& e, const ExpertPart& part, std::int64_t hidden) {
    const auto count = static_cast<std::int64_t>(e.down.size());
    if (e.router.empty()) {
        require(e.down.empty() && e.gate_up.empty() && e.shared_down.empty(), "router", "is missing");
        return;
    }
    require(count > 0 && count <= kMostExperts && e.top > 0 && e.top <= count, "top", "is no number of experts");
    expect_one(e.router, "router", count, hidden);
    require(e.router[0].rounding == Rounding::kNone, "router", "rounds its inputs");
    expect_bias(e.router_bias, "router_bias", {count});
    expect_bias(e.correction, "router_correction", {count});
    require(e.groups > 0 && e.groups <= kMostGroups && count % e.groups == 0 &&
                (e.groups == 1 || count / e.groups >= e.best_per_group),
            "groups", "do not divide the experts");
    require(e.top_groups > 0 && e.top_groups <= e.groups && e.top <= count / e.groups * e.top_groups, "top_groups",
            "is no number of groups, or they have too few experts");
    require(e.best_per_group == 1 || e.best_per_group == 2, "best_per_group", "is neither 1 nor 2");
    require(std::isfinite(e.share_scale), "share_scale", "is not finite");
    require(std::isfinite(e.alpha) && std::isfinite(e.limit) && (e.alpha == 0 || e.limit > 0), "swiglu_limit",
            "is not a positive number");
    const auto parts = static_cast<std::int64_t>(e.gate_up.size()) / count;
    require((parts == 1 || parts == 2) && e.gate_up.size() == e.down.size() * static_cast<std::size_t>(parts),
            "expert_gate_up", "has another number of experts");
    const std::int64_t inner = expert_inner(e), own = part.hidden.count;
    expect_bias(e.gate_up_bias, "expert_gate_up_bias", {count, 2 * part.inner.count});
    expect_bias(e.down_bias, "expert_down_bias", {count, own});
    require(inner > 0, "expert_down", "has another shape");
    for (const Weight& weight : e.gate_up) {
        expect_one({weight}, "expert_gate_up", 2 / parts * part.inner.count, hidden);
        require(weight.rounding == e.gate_up[0].rounding, "expert_gate_up",
                "has experts that round their inputs differently");
    }
    for (const Weight& weight : e.down) {
        expect_one({weight}, "expert_down", own, inner);
        require(weight.rounding == e.down[0].rounding, "expert_down",
                "has experts that round their inputs differently");
    }
    if (!e.shared_down.empty()) {
        const std::int64_t shared = shared_inner(e);
        require(shared > 0, "shared_down", "has another shape");
        const std::size_t halves = e.shared_gate_up.size();
        require(halves == 1 || halves == 2, "shared_gate_up", "has another shape");
        for (const Weight& weight : e.shared_gate_up) {
            const std::int64_t rows = 2 * part.shared_inner.count / static_cast<std::int64_t>(halves);
            expect_one({weight}, "shared_gate_up", rows, hidden);
            require(weight.rounding == e.gate_up[0].rounding, "shared_gate_up",
                    "rounds its inputs differently than the experts");
        }
        expect_one(e.shared_down, "shared_down", own, shared);
        if (!e.shared_gate.empty()) {
            expect_one(e.shared_gate, "shared_gate", 1, hidden);
            require(e.shared_gate[0].rounding == Rounding::kNone, "shared_gate", "rounds its inputs");
        }
    }
}

}  // namespace octavo
