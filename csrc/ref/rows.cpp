#include <cmath>

#include "element.h"
#include "ref.h"

namespace octavo::ref {
namespace {

double silu(double x) { return x / (1 + std::exp(-x)); }

double gelu(double x) {
    constexpr double kRootOfTwoOverPi = 0.79788456080286535588;
    return 0.5 * x * (1 + std::tanh(kRootOfTwoOverPi * (x + 0.044715 * x * x * x)));
}

void act_and_mul(const TensorRef& out, const TensorRef& x, double (*act)(double)) {
    check::act_and_mul(out, x);
    const std::int64_t count = out.shape[1];
    for (std::int64_t row = 0; row < x.shape[0]; ++row) {
        for (std::int64_t i = 0; i < count; ++i) {
            put(out, act(get(x, row, i)) * get(x, row, count + i), row, i);
        }
    }
}

}  // namespace

void rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight, float eps) {
    check::rms_norm(out, x, weight);
    const std::int64_t count = x.shape[1];
    for (std::int64_t row = 0; row < x.shape[0]; ++row) {
        double squares = 0;
        for (std::int64_t i = 0; i < count; ++i) {
            squares += get(x, row, i) * get(x, row, i);
        }
        const double root = std::sqrt(squares / static_cast<double>(count) + static_cast<double>(eps));
        for (std::int64_t i = 0; i < count; ++i) {
            put(out, get(x, row, i) / root * get(weight, i), row, i);
        }
    }
}

void fused_add_rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& sum, const TensorRef& weight,
                        float eps) {
    check::fused_add_rms_norm(out, x, sum, weight);
    for (std::int64_t row = 0; row < x.shape[0]; ++row) {
        for (std::int64_t i = 0; i < x.shape[1]; ++i) {
            put(sum, get(sum, row, i) + get(x, row, i), row, i);
        }
    }
    ref::rms_norm(out, sum, weight, eps);
}

void silu_and_mul(const TensorRef& out, const TensorRef& x) { act_and_mul(out, x, silu); }
void gelu_and_mul(const TensorRef& out, const TensorRef& x) { act_and_mul(out, x, gelu); }

void rotary(const TensorRef& out, const TensorRef& heads, const TensorRef& cos, const TensorRef& sin) {
    check::rotary(out, heads, cos, sin);
    const std::int64_t half = cos.shape[1] / 2;
    for (std::int64_t token = 0; token < heads.shape[0]; ++token) {
        for (std::int64_t head = 0; head < heads.shape[1]; ++head) {
            for (std::int64_t i = 0; i < half; ++i) {
                const double a = get(heads, token, head, i), b = get(heads, token, head, half + i);
                const double c = get(cos, token, i), s = get(sin, token, i);
                put(out, a * c - b * s, token, head, i);
                put(out, b * c + a * s, token, head, half + i);
            }
            for (std::int64_t i = 2 * half; i < heads.shape[2]; ++i) {
                put(out, get(heads, token, head, i), token, head, i);
            }
        }
    }
}

void argmax(const TensorRef& ids, const TensorRef& x) {
    check::argmax(ids, x);
    for (std::int64_t row = 0; row < x.shape[0]; ++row) {
        std::int64_t best = 0;
        for (std::int64_t i = 0; i < x.shape[1] && !std::isnan(get(x, row, best)); ++i) {
            best = get(x, row, i) > get(x, row, best) || std::isnan(get(x, row, i)) ? i : best;
        }
        ids.as<std::int64_t>()[row * ids.stride[0]] = best;
    }
}

}  // namespace octavo::ref
