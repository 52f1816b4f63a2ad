#include "rows.cuh"

#include "api.h"
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

}  // namespace

void rms_norm(const TensorRef& out, const TensorRef& x, const TensorRef& weight, float eps, StreamHandle stream) {
    norm(out, x, nullptr, weight, eps, stream);
}

void fused_add_rms_norm(const TensorRef& x, const TensorRef& residual, const TensorRef& weight, float eps,
                        StreamHandle stream) {
    norm(x, x, &residual, weight, eps, stream);
}

void silu_and_mul(const TensorRef& out, const TensorRef& x, StreamHandle stream) {
    with_float(x.dtype, "x", [&](auto tag) {
        using T = typename decltype(tag)::Type;
        expect(x, "x", {kAny, kAny});
        require(x.shape[1] % 2 == 0, "x", "has an odd number of columns");
        expect(out, "out", {x.shape[0], x.shape[1] / 2}, x.dtype);
        expect_apart_or_same(out, "out", {&x});
        if (out.size() == 0) {
            return;
        }
        const SiluParams<T> params{out.as<T>(),
                                   x.as<T>(),
                                   out.stride[0],
                                   x.stride[0],
                                   static_cast<int>(out.shape[1]),
                                   out.shape[1] % 8 == 0 && whole_rows({&out, &x}, 1)};
        constexpr std::int64_t kPiece = 8 * kRowThreads;
        const auto pieces = static_cast<unsigned>(std::min<std::int64_t>((out.shape[1] + kPiece - 1) / kPiece, 65535));
        launch(silu_and_mul_kernel<T>, dim3(static_cast<unsigned>(x.shape[0]), pieces), kRowThreads, 0,
               as_stream(stream), params);
    });
}

}  // namespace octavo::cuda
