// The ops on rows: each checks its arguments, then gives its rows to the threads of the pool.
#include <vector>

#include "linear.h"
#include "octavo/api.h"
#include "octavo/check.h"
#include "rope.h"

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

// Rows one thread takes at once, so that small ones are not handed out one by one.
template <typename Body>
void each_row(std::int64_t rows, std::int64_t floats, Body&& body) {
    const std::int64_t some = floats >= 4096 ? 1 : 4096 / (floats + 1) + 1;
    Pool& pool = Pool::instance();
    const auto run = [&](PoolThread& thread) {
        thread.each((rows + some - 1) / some, [&](std::int64_t turn) {
            for (std::int64_t row = turn * some; row < rows && row < (turn + 1) * some; ++row) {
                body(thread, row);
            }
        });
    };
    pool.run(run);
}

// That there is a row of angles for each of `tokens`; looks at positions.
void expect_angles(const TensorRef& positions, const TensorRef& cos, const TensorRef& sin, std::int64_t rotated,
                   std::int64_t tokens, std::int64_t head_dim) {
    require(rotated >= 0 && rotated % 2 == 0 && rotated <= head_dim, "rotated",
            "is not an even number of dimensions, at most head_dim");
    expect(cos, "cos", {kAny, kAny}, DType::kF32);
    expect(sin, "sin", {cos.shape[0], kAny}, DType::kF32);
    require(cos.shape[1] >= rotated / 2, "cos", "has fewer columns than rotated / 2");
    require(sin.shape[1] >= rotated / 2, "sin", "has fewer columns than rotated / 2");
    if (!positions.given()) {
        require(cos.shape[0] >= tokens, "cos", "has fewer rows than there are tokens");
        return;
    }
    expect(positions, "positions", {tokens}, DType::kI64);
    for (std::int64_t token = 0; token < tokens; ++token) {
        const std::int64_t position = positions.as<std::int64_t>()[token];
        require(position >= 0 && position < cos.shape[0], "positions", "is out of range");
    }
}

}  // namespace

void check::rotary(const TensorRef& heads, const TensorRef& positions, const TensorRef& cos, const TensorRef& sin,
                   std::int64_t rotated) {
    expect(heads, "heads", {kAny, kAny, kAny});
    same_floats(heads, "heads", heads.dtype);
    expect_angles(positions, cos, sin, rotated, heads.shape[0], heads.shape[2]);
    expect_apart(heads, "heads", {&positions, &cos, &sin});
}

void rotary(const TensorRef& heads, const TensorRef& positions, const TensorRef& cos, const TensorRef& sin,
            std::int64_t rotated, bool interleaved) {
    check::rotary(heads, positions, cos, sin, rotated);
    if (heads.size() == 0) {
        return;
    }
    const std::int64_t num = heads.shape[1], dim = heads.shape[2];
    each_row(heads.shape[0], num * dim, [&](PoolThread& thread, std::int64_t token) {
        float* wide = thread.scratch(2 * dim);
        const Rope rope = rope_of(positions, cos, sin, rotated, token, interleaved);
        for (std::int64_t head = 0; head < num; ++head) {
            char* to = const_cast<char*>(at(heads, token, head));
            kernels().to_float(heads.dtype, to, dim, wide);
            turn(kernels(), rope, wide, wide + dim);
            kernels().from_float(heads.dtype, wide, dim, to);
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
    each_row(x.shape[0], count, [&](PoolThread& thread, std::int64_t row) {
        float* wide = thread.scratch(2 * count);
        kernels().to_float(x.dtype, at(x, row), count, wide);
        kernels().rms_norm(wide, weight.as<float>(), eps, count, wide + count);
        kernels().from_float(x.dtype, wide + count, count, const_cast<char*>(at(out, row)));
    });
}

void check::silu_and_mul(const TensorRef& out, const TensorRef& x) {
    expect(x, "x", {kAny, kAny});
    require(x.shape[1] % 2 == 0, "x", "has an odd number of columns");
    same_floats(x, "x", x.dtype);
    expect(out, "out", {x.shape[0], x.shape[1] / 2}, x.dtype);
    expect_apart_or_same(out, "out", {&x});
}

void silu_and_mul(const TensorRef& out, const TensorRef& x) {
    check::silu_and_mul(out, x);
    if (out.size() == 0) {
        return;
    }
    const std::int64_t count = x.shape[1] / 2;
    each_row(x.shape[0], count, [&](PoolThread& thread, std::int64_t row) {
        float* wide = thread.scratch(3 * count);
        kernels().to_float(x.dtype, at(x, row), 2 * count, wide);
        kernels().silu_mul(wide, wide + count, count, wide + 2 * count);
        kernels().from_float(x.dtype, wide + 2 * count, count, const_cast<char*>(at(out, row)));
    });
}

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
    const std::int64_t columns = x.shape[0];
    const auto blocks = static_cast<std::size_t>(num_blocks(columns, weight.cols));
    const Rounding rounding = weight.rounding;
    std::vector<InputBlock> digits(has_digits(rounding) ? blocks : 0);
    std::vector<Bf16Block> bf16(rounding == Rounding::kBf16 ? blocks : 0);
    const Inputs inputs{digits.data(), bf16.data()};
    const LinearJob job{weight,  x.as<float>(),   x.stride[0],   inputs.digits,    inputs.bf16,
                        columns, out.as<float>(), out.stride[0], bias.as<float>(), false};
    Pool& pool = Pool::instance();
    const int threads = pool.size();
    pool.run([&](PoolThread& thread) {
        thread.each(rounding == Rounding::kNone ? 0 : columns, [&](std::int64_t i) {
            round_inputs(weight, x.as<float>() + i * x.stride[0], i, 0, weight.cols, inputs);
        });
        run_linear(thread, threads, job);
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
    each_row(rows.shape[0], weight.cols, [&](PoolThread&, std::int64_t i) {
        kernels().weight_row(weight, ids[i], out.as<float>() + i * out.stride[0]);
    });
}

}  // namespace octavo
