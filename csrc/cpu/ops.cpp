// Ops on rows: each checks, then gives its rows to the lanes.
#include <algorithm>
#include <cmath>
#include <vector>

#include "linear.h"
#include "octavo/api.h"
#include "octavo/check.h"

namespace octavo {
namespace {

void same_floats(const TensorRef& tensor, const char* name, DType dtype) {
    require(tensor.is_float(), name, "must be floats");
    require(tensor.dtype == dtype, name, "is not of the other arguments' type");
}

const char* at(const TensorRef& tensor, std::int64_t i, std::int64_t j = 0) {
    const std::int64_t inner = tensor.ndim > 2 ? j * tensor.stride[1] : 0;
    return tensor.as<char>() + (i * tensor.stride[0] + inner) * size_of(tensor.dtype);
}

// Rows one lane takes at once, so that small ones are not handed out one by one.
template <typename Body>
void each_row(std::int64_t rows, std::int64_t floats, Body&& body) {
    const std::int64_t some = floats >= 4096 ? 1 : 4096 / (floats + 1) + 1;
    Pool& pool = Pool::instance();
    const auto run = [&](Lane& lane) {
        lane.each((rows + some - 1) / some, [&](std::int64_t turn) {
            for (std::int64_t row = turn * some; row < rows && row < (turn + 1) * some; ++row) {
                body(lane, row);
            }
        });
    };
    pool.run(run);
}

using Act = void (*)(const float*, const float*, std::int64_t, float*);

void act_and_mul(const TensorRef& out, const TensorRef& x, Act act) {
    check::act_and_mul(out, x);
    if (out.size() == 0) {
        return;
    }
    const std::int64_t count = x.shape[1] / 2;
    each_row(x.shape[0], count, [&](Lane& lane, std::int64_t row) {
        float* wide = lane.scratch(3 * count);
        kernels().to_float(x.dtype, at(x, row), 2 * count, wide);
        act(wide, wide + count, count, wide + 2 * count);
        kernels().from_float(x.dtype, wide + 2 * count, count, const_cast<char*>(at(out, row)));
    });
}

}  // namespace

void check::rotary(const TensorRef& out, const TensorRef& heads, const TensorRef& cos, const TensorRef& sin) {
    expect(heads, "heads", {kAny, kAny, kAny});
    const std::int64_t tokens = heads.shape[0], num = heads.shape[1], dim = heads.shape[2];
    same_floats(heads, "heads", heads.dtype);
    expect(out, "out", {tokens, num, dim}, heads.dtype);
    expect(cos, "cos", {tokens, kAny}, DType::kF32);
    const std::int64_t half = cos.shape[1] / 2;
    require(cos.shape[1] % 2 == 0 && 2 * half <= dim, "cos",
            "rotates an odd number of dimensions, or more than a head has");
    expect(sin, "sin", {tokens, cos.shape[1]}, DType::kF32);
    expect_apart_or_same(out, "out", {&heads});
    expect_apart(out, "out", {&cos, &sin});
}

void rotary(const TensorRef& out, const TensorRef& heads, const TensorRef& cos, const TensorRef& sin) {
    check::rotary(out, heads, cos, sin);
    if (out.size() == 0) {
        return;
    }
    const std::int64_t tokens = heads.shape[0], num = heads.shape[1], dim = heads.shape[2], half = cos.shape[1] / 2;
    each_row(tokens, num * dim, [&](Lane& lane, std::int64_t token) {
        float* wide = lane.scratch(2 * dim);
        const float* c = cos.as<float>() + token * cos.stride[0];
        const float* s = sin.as<float>() + token * sin.stride[0];
        for (std::int64_t head = 0; head < num; ++head) {
            kernels().to_float(heads.dtype, at(heads, token, head), dim, wide);
            kernels().to_float(DType::kF32, wide, dim, wide + dim);
            kernels().rotate(wide, c, s, half, wide + dim);
            kernels().from_float(heads.dtype, wide + dim, dim, const_cast<char*>(at(out, token, head)));
        }
    });
}

void check::rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight) {
    expect(x, "x", {kAny, kAny});
    same_floats(x, "x", x.dtype);
    expect(out, "out", {x.shape[0], x.shape[1]}, x.dtype);
    expect(weight, "weight", {x.shape[1]}, DType::kF32);
    expect_apart_or_same(out, "out", {&x});
    expect_apart(out, "out", {&weight});
}

void rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight, float eps) {
    check::rms_norm(out, x, weight);
    if (out.size() == 0) {
        return;
    }
    const std::int64_t count = x.shape[1];
    each_row(x.shape[0], count, [&](Lane& lane, std::int64_t row) {
        float* wide = lane.scratch(2 * count);
        kernels().to_float(x.dtype, at(x, row), count, wide);
        kernels().rms_norm(wide, weight.as<float>(), eps, count, wide + count);
        kernels().from_float(x.dtype, wide + count, count, const_cast<char*>(at(out, row)));
    });
}

void check::fused_add_rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& sum,
                               const TensorRef& weight) {
    rms_norm(out, x, weight);
    expect(sum, "sum", {x.shape[0], x.shape[1]}, x.dtype);
    expect_apart_or_same(sum, "sum", {&x});
    expect_apart(sum, "sum", {&out, &weight});
}

void fused_add_rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& sum, const TensorRef& weight,
                        float eps) {
    check::fused_add_rms_norm(out, x, sum, weight);
    if (out.size() == 0) {
        return;
    }
    const std::int64_t count = x.shape[1];
    each_row(x.shape[0], count, [&](Lane& lane, std::int64_t row) {
        float* wide = lane.scratch(2 * count);
        char* to = const_cast<char*>(at(sum, row));
        kernels().to_float(x.dtype, at(x, row), count, wide);
        kernels().to_float(x.dtype, to, count, wide + count);
        kernels().add(wide, count, wide + count);
        kernels().from_float(x.dtype, wide + count, count, to);
        kernels().rms_norm(wide + count, weight.as<float>(), eps, count, wide);
        kernels().from_float(x.dtype, wide, count, const_cast<char*>(at(out, row)));
    });
}

void check::act_and_mul(const TensorRef& out, const TensorRef& x) {
    expect(x, "x", {kAny, kAny});
    require(x.shape[1] % 2 == 0, "x", "has an odd number of columns");
    same_floats(x, "x", x.dtype);
    expect(out, "out", {x.shape[0], x.shape[1] / 2}, x.dtype);
    expect_apart_or_same(out, "out", {&x});
}

void silu_and_mul(const TensorRef& out, const TensorRef& x) { act_and_mul(out, x, kernels().silu_mul); }
void gelu_and_mul(const TensorRef& out, const TensorRef& x) { act_and_mul(out, x, kernels().gelu_mul); }

void check::linear(const TensorRef& out, const TensorRef& x, const Weight& weight, const TensorRef& bias) {
    expect(x, "x", {kAny, weight.cols}, DType::kF32);
    expect(out, "out", {x.shape[0], weight.rows}, DType::kF32);
    if (bias.given()) {
        expect(bias, "bias", {weight.rows}, DType::kF32);
    }
    const TensorRef numbers = memory_of(weight);
    expect_apart(out, "out", {&x, &bias, &numbers});
}

void linear(const TensorRef& out, const TensorRef& x, const Weight& weight, const TensorRef& bias) {
    check::linear(out, x, weight, bias);
    if (out.size() == 0) {
        return;
    }
    const std::int64_t blocks = weight.cols / kBlock, columns = x.shape[0];
    const bool rounded = weight.quantizes_inputs();
    const std::int64_t num_inputs = rounded ? input_at(columns + kInputColumns, blocks) : 0;
    std::vector<InputBlock> inputs(static_cast<std::size_t>(num_inputs));
    const LinearJob job{weight,          x.as<float>(), x.stride[0],      inputs.data(), columns,
                        out.as<float>(), out.stride[0], bias.as<float>(), false};
    Pool& pool = Pool::instance();
    const int lanes = pool.size();
    pool.run([&](Lane& lane) {
        lane.each(rounded ? columns : 0, [&](std::int64_t i) {
            kernels().quantize(x.as<float>() + i * x.stride[0], weight.cols, inputs.data() + input_at(i, blocks));
        });
        run_linear(lane, lanes, job);
    });
}

void check::weight_rows(const TensorRef& out, const Weight& weight, const TensorRef& rows) {
    expect(rows, "rows", {kAny}, DType::kI64);
    expect(out, "out", {rows.shape[0], weight.cols}, DType::kF32);
    const auto* ids = rows.as<std::int64_t>();
    for (std::int64_t i = 0; i < rows.shape[0]; ++i) {
        require(ids[i] >= 0 && ids[i] < weight.rows, "rows", "names a row that is not there");
    }
    const TensorRef numbers = memory_of(weight);
    expect_apart(out, "out", {&rows, &numbers});
}

void weight_rows(const TensorRef& out, const Weight& weight, const TensorRef& rows) {
    check::weight_rows(out, weight, rows);
    const auto* ids = rows.as<std::int64_t>();
    each_row(rows.shape[0], weight.cols,
             [&](Lane&, std::int64_t i) { kernels().weight_row(weight, ids[i], out.as<float>() + i * out.stride[0]); });
}

void check::argmax(const TensorRef& ids, const TensorRef& x) {
    expect(x, "x", {kAny, kAny}, DType::kF32);
    require(x.shape[1] > 0, "x", "has no columns");
    expect(ids, "ids", {x.shape[0]}, DType::kI64);
    expect_apart(ids, "ids", {&x});
}

void argmax(const TensorRef& ids, const TensorRef& x) {
    check::argmax(ids, x);
    if (ids.size() == 0) {
        return;
    }
    each_row(x.shape[0], x.shape[1], [&](Lane&, std::int64_t row) {
        ids.as<std::int64_t>()[row] = kernels().argmax(x.as<float>() + row * x.stride[0], x.shape[1]);
    });
}

void check::merge_states(const TensorRef& out, const TensorRef& parts, const TensorRef& lse) {
    expect(parts, "parts", {kAny, kAny, kAny, kAny}, DType::kF32);
    const std::int64_t num = parts.shape[0], tokens = parts.shape[1], heads = parts.shape[2], dim = parts.shape[3];
    expect(lse, "lse", {num, tokens, heads}, DType::kF32);
    expect(out, "out", {tokens, heads, dim}, DType::kF32);
    require(num > 0, "parts", "is empty");
    expect_apart(out, "out", {&parts, &lse});
}

void merge_states(const TensorRef& out, const TensorRef& parts, const TensorRef& lse) {
    check::merge_states(out, parts, lse);
    if (out.size() == 0) {
        return;
    }
    const std::int64_t num = parts.shape[0], tokens = parts.shape[1], heads = parts.shape[2], dim = parts.shape[3];
    each_row(tokens * heads, num * dim, [&](Lane& lane, std::int64_t row) {
        const std::int64_t token = row / heads, head = row % heads;
        const auto weight_at = [&](std::int64_t part) {
            return lse.as<float>()[part * lse.stride[0] + token * lse.stride[1] + head];
        };
        float top = weight_at(0), total = 0;
        for (std::int64_t part = 1; part < num; ++part) {
            top = weight_at(part) > top ? weight_at(part) : top;
        }
        float* sum = lane.scratch(dim);
        std::fill(sum, sum + dim, 0.0F);
        for (std::int64_t part = 0; part < num; ++part) {
            const float weight = weight_at(part) == top ? 1.0F : std::exp(weight_at(part) - top);
            const float* x =
                parts.as<float>() + part * parts.stride[0] + token * parts.stride[1] + head * parts.stride[2];
            for (std::int64_t d = 0; weight > 0 && d < dim; ++d) {
                sum[d] += weight * x[d];
            }
            total += weight;
        }
        float* to = out.as<float>() + token * out.stride[0] + head * out.stride[1];
        for (std::int64_t d = 0; d < dim; ++d) {
            to[d] = sum[d] / total;
        }
    });
}

}  // namespace octavo
