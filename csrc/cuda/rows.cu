#include "rows.cuh"

#include "api.h"
#include "common/angles.h"
#include "common/dispatch.h"
#include "device.h"

namespace octavo::cuda {
namespace {

// residual: or null.
void norm(const TensorRef& out, const TensorRef& x, const TensorRef* residual, const TensorRef& weight, float eps,
          StreamHandle stream) {
    const std::int64_t size = weight.ndim == 1 ? weight.shape[0] : 0;
    with_float(x.dtype, "x", [&](auto tag) {
        using T = typename decltype(tag)::Type;
        expect(weight, "weight", {kAny}, x.dtype);
        expect(x, "x", {kAny, size});
        expect(out, "out", {x.shape[0], size}, x.dtype);
        const TensorRef sum = residual ? *residual : TensorRef{};
        if (residual) {
            expect(sum, "residual", {x.shape[0], size}, x.dtype);
            expect_apart(sum, "residual", {&x, &weight});
        }
        const char* written = residual ? "x" : "out";
        expect_apart_or_same(out, written, {&x});
        expect_apart(out, written, {&weight});
        if (x.size() == 0) {
            return;
        }
        const NormParams<T> params{out.as<T>(),   x.as<T>(),
                                   sum.as<T>(),   weight.as<T>(),
                                   out.stride[0], x.stride[0],
                                   sum.stride[0], static_cast<int>(size),
                                   eps,           whole_rows({&out, &x, &sum, &weight}, 1)};
        launch(rms_norm_kernel<T>, dim3(static_cast<unsigned>(x.shape[0])), kRowThreads, 128, as_stream(stream),
               params);
    });
}

Activation activation_named(const std::string& name) {
    if (name == "silu") {
        return Activation::kSilu;
    }
    if (name == "gelu") {
        return Activation::kGelu;
    }
    require(name == "gelu_tanh", "activation", "is none of silu, gelu, gelu_tanh");
    return Activation::kGeluTanh;
}

}  // namespace

void rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight, float eps, StreamHandle stream) {
    norm(out, x, nullptr, weight, eps, stream);
}

void fused_add_rms_norm(const TensorRef& x, const TensorRef& residual, const TensorRef& weight, float eps,
                        StreamHandle stream) {
    norm(x, x, &residual, weight, eps, stream);
}

void activate_and_mul(const TensorRef& out, const TensorRef& x, const std::string& activation, StreamHandle stream) {
    const Activation kind = activation_named(activation);
    with_float(x.dtype, "x", [&](auto tag) {
        using T = typename decltype(tag)::Type;
        expect(x, "x", {kAny, kAny});
        require(x.shape[1] % 2 == 0, "x", "has an odd number of columns");
        expect(out, "out", {x.shape[0], x.shape[1] / 2}, x.dtype);
        expect_apart_or_same(out, "out", {&x});
        if (out.size() == 0) {
            return;
        }
        const ActivationParams<T> params{out.as<T>(),
                                         x.as<T>(),
                                         out.stride[0],
                                         x.stride[0],
                                         static_cast<int>(out.shape[1]),
                                         kind,
                                         out.shape[1] % 8 == 0 && whole_rows({&out, &x}, 1)};
        constexpr std::int64_t kPiece = 8 * kRowThreads;
        const auto pieces = static_cast<unsigned>(std::min<std::int64_t>((out.shape[1] + kPiece - 1) / kPiece, 65535));
        launch(activate_and_mul_kernel<T>, dim3(static_cast<unsigned>(x.shape[0]), pieces), kRowThreads, 0,
               as_stream(stream), params);
    });
}

void rotary(const TensorRef& heads, const TensorRef& positions, const TensorRef& cos, const TensorRef& sin, int rotated,
            bool interleaved, StreamHandle stream) {
    with_float(heads.dtype, "heads", [&](auto tag) {
        with_float(cos.dtype, "cos", [&](auto angle) {
            using T = typename decltype(tag)::Type;
            using C = typename decltype(angle)::Type;
            expect(heads, "heads", {kAny, kAny, kAny});
            expect_angles(positions, cos, sin, heads.shape[0], rotated, heads.shape[2]);
            expect_apart(heads, "heads", {&positions, &cos, &sin});
            require(volume({heads.shape[1], heads.shape[2]}) <= INT32_MAX, "heads", "are too many");
            if (heads.size() == 0) {
                return;
            }
            const RotaryParams<T, C> params{heads.as<T>(),
                                            positions.as<std::int64_t>(),
                                            cos.as<C>(),
                                            sin.as<C>(),
                                            heads.stride[0],
                                            heads.stride[1],
                                            cos.stride[0],
                                            sin.stride[0],
                                            cos.shape[0],
                                            fault_word(),
                                            static_cast<int>(heads.shape[1]),
                                            rotated / 2,
                                            interleaved};
            launch(rotary_kernel<T, C>, dim3(static_cast<unsigned>(heads.shape[0])), kRowThreads, 0, as_stream(stream),
                   params);
        });
    });
}

}  // namespace octavo::cuda
