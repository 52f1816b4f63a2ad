#include "linear.h"

#include <type_traits>

#include "common/dispatch.h"
#include "common/kv_cache.h"

namespace octavo::cuda {
namespace {

template <typename Weight>
LinearParams<Weight> params_of(const TensorRef& out, const TensorRef& x, const TensorRef& bias) {
    using T = typename Weight::T;
    LinearParams<Weight> p{};
    p.out = out.as<T>();
    p.x = x.as<T>();
    p.bias = bias.as<T>();
    p.out_stride = out.stride[0];
    p.x_stride = x.stride[0];
    p.tokens = static_cast<int>(x.shape[0]);
    p.rows = static_cast<int>(out.shape[1]);
    p.columns = static_cast<int>(x.shape[1]);
    p.whole_out = reinterpret_cast<std::uintptr_t>(out.data) % 4 == 0 && out.stride[0] % 2 == 0;
    return p;
}

template <typename T>
void launch_simt(const TensorRef& out, const TensorRef& x, const TensorRef& weight, const TensorRef& bias,
                 Stream stream) {
    auto p = params_of<AnyWeight<T>>(out, x, bias);
    p.weight = {weight.as<T>(), weight.stride[0]};
    p.tiling = Tiling::of(p.rows, p.tokens, kSimtTile, kSimtTile);
    constexpr std::size_t kShared = 2UL * sizeof(float) * kSimtColumns * (kSimtTile + 4);
    const int most = resident_blocks(linear_simt_kernel<T>, kLinearThreads, kShared);
    launch(linear_simt_kernel<T>, dim3(static_cast<unsigned>(std::min(p.tiling.count(), most))), kLinearThreads,
           kShared, stream, p);
}

}  // namespace

void linear(const TensorRef& out, const TensorRef& x, const TensorRef& weight, const TensorRef& bias,
            StreamHandle stream) {
    with_float(x.dtype, "x", [&](auto tag) {
        using T = typename decltype(tag)::Type;
        expect(x, "x", {kAny, kAny});
        require(x.shape[1] > 0, "x", "has no columns");
        expect(weight, "weight", {kAny, x.shape[1]}, x.dtype);
        expect(out, "out", {x.shape[0], weight.shape[0]}, x.dtype);
        if (bias.given()) {
            expect(bias, "bias", {weight.shape[0]}, x.dtype);
        }
        expect_apart(out, "out", {&x, &weight, &bias});
        require(volume({out.shape[0] + 2 * kTokensTogether, out.shape[1] + 2 * kTokensTogether}) / 512 <= kMostInInt,
                "out", "has too many rows and columns");  // tiles are counted by int
        if (out.size() == 0) {
            return;
        }
        if constexpr (!std::is_same_v<T, float>) {
            // By the weights alone, so that every batch has the same arithmetic.
            if (x.shape[1] % 8 == 0 && whole_rows({&weight}, 1)) {
                require(whole_rows({&x}, 1), "x", "has rows that do not lie at multiples of 16 bytes");
                auto p = params_of<PlainWeight<T>>(out, x, bias);
                p.weight = {weight.as<T>(), weight.stride[0], p.rows, p.columns};
                launch_linear(p, as_stream(stream));
                return;
            }
        }
        launch_simt<T>(out, x, weight, bias, as_stream(stream));
    });
}

}  // namespace octavo::cuda
