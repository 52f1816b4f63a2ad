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

void check_product(const TensorRef& out, const TensorRef& x, const TensorRef& bias) {
    expect(x, "x", {kAny, kAny});
    require(x.shape[1] > 0, "x", "has no columns");
    expect(out, "out", {x.shape[0], kAny}, x.dtype);
    if (bias.given()) {
        expect(bias, "bias", {out.shape[1]}, x.dtype);
    }
    require(volume({out.shape[0] + 2 * kTokensTogether, out.shape[1] + 2 * kTokensTogether}) / 512 <= kMostInInt, "out",
            "has too many rows and columns");  // tiles are counted by int
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
        check_product(out, x, bias);
        expect(weight, "weight", {out.shape[1], x.shape[1]}, x.dtype);
        expect_apart(out, "out", {&x, &weight, &bias});
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

namespace {

PackedFormat format_named(const std::string& name) {
    require(name == "q4" || name == "q4_mins" || name == "e4m3", "format", "is none of q4, q4_mins, e4m3");
    return name == "q4" ? PackedFormat::kQ4 : name == "q4_mins" ? PackedFormat::kQ4Mins : PackedFormat::kE4M3;
}

template <typename T, PackedFormat kFormat>
void launch_packed(const TensorRef& out, const TensorRef& x, const TensorRef& weight, const TensorRef& bias,
                   Stream stream) {
    auto p = params_of<PackedWeight<T, kFormat>>(out, x, bias);
    p.weight = {weight.as<unsigned char>(), p.rows, p.columns};
    launch_linear(p, stream);
}

}  // namespace

void linear_packed(const TensorRef& out, const TensorRef& x, const TensorRef& weight, const std::string& format,
                   const TensorRef& bias, StreamHandle stream) {
    const PackedFormat kind = format_named(format);
    with_float(x.dtype, "x", [&](auto tag) {
        using T = typename decltype(tag)::Type;
        if constexpr (std::is_same_v<T, float>) {
            throw ArgumentError("x", "is float32, not float16 or bfloat16");
        } else {
            check_product(out, x, bias);
            require(x.shape[1] % 8 == 0, "x", "has columns that are no multiple of 8");
            require(whole_rows({&x}, 1), "x", "has rows that do not lie at multiples of 16 bytes");
            const std::int64_t chunks = volume(
                {(out.shape[1] + kChunkRows - 1) / kChunkRows, (x.shape[1] + kChunkColumns - 1) / kChunkColumns});
            expect(weight, "weight", {volume({chunks, packed_chunk_bytes(kind)})}, DType::kU8);
            require(reinterpret_cast<std::uintptr_t>(weight.data) % 16 == 0, "weight",
                    "does not lie at a multiple of 16 bytes");
            expect_apart(out, "out", {&x, &weight, &bias});
            if (out.size() == 0) {
                return;
            }
            const auto launch = kind == PackedFormat::kQ4       ? launch_packed<T, PackedFormat::kQ4>
                                : kind == PackedFormat::kQ4Mins ? launch_packed<T, PackedFormat::kQ4Mins>
                                                                : launch_packed<T, PackedFormat::kE4M3>;
            launch(out, x, weight, bias, as_stream(stream));
        }
    });
}

}  // namespace octavo::cuda
