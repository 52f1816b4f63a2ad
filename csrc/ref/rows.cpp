#include <cmath>
#include <utility>
#include <vector>

#include "element.h"
#include "ref.h"

namespace octavo::ref {
namespace {

double silu(double x) { return x / (1 + std::exp(-x)); }

// Turns a head of token `token` in place.
void turn(std::vector<double>& head, const TensorRef& positions, const TensorRef& cos, const TensorRef& sin,
          std::int64_t rotated, std::int64_t token, bool interleaved) {
    const std::int64_t half = rotated / 2, row = positions.given() ? get_int(positions, token) : token;
    for (std::int64_t i = 0; i < half; ++i) {
        double &a = head[static_cast<std::size_t>(interleaved ? 2 * i : i)],
               &b = head[static_cast<std::size_t>(interleaved ? 2 * i + 1 : i + half)];
        const double c = get(cos, row, i), s = get(sin, row, i);
        a = std::exchange(b, b * c + a * s) * -s + a * c;
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

void silu_and_mul(const TensorRef& out, const TensorRef& x) {
    check::silu_and_mul(out, x);
    const std::int64_t count = out.shape[1];
    for (std::int64_t row = 0; row < x.shape[0]; ++row) {
        for (std::int64_t i = 0; i < count; ++i) {
            put(out, silu(get(x, row, i)) * get(x, row, count + i), row, i);
        }
    }
}

void rotary(const TensorRef& heads, const TensorRef& positions, const TensorRef& cos, const TensorRef& sin,
            std::int64_t rotated, bool interleaved) {
    check::rotary(heads, positions, cos, sin, rotated);
    for (std::int64_t token = 0; token < heads.shape[0]; ++token) {
        for (std::int64_t head = 0; head < heads.shape[1]; ++head) {
            std::vector<double> row;
            for (std::int64_t i = 0; i < heads.shape[2]; ++i) {
                row.push_back(get(heads, token, head, i));
            }
            turn(row, positions, cos, sin, rotated, token, interleaved);
            for (std::int64_t i = 0; i < heads.shape[2]; ++i) {
                put(heads, row[static_cast<std::size_t>(i)], token, head, i);
            }
        }
    }
}

}  // namespace octavo::ref
