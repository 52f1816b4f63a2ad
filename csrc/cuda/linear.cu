#include "linear.h"

#include <algorithm>
#include <cmath>
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
    p.x = x.as<typename Weight::Input>();
    p.bias = bias.as<T>();
    p.out_stride = out.stride[0];
    p.x_stride = x.stride[0];
    p.tokens = static_cast<int>(x.shape[0]);
    p.rows = static_cast<int>(out.shape[1]);
    p.columns = p.x_columns = static_cast<int>(x.shape[1]);
    p.whole_out = reinterpret_cast<std::uintptr_t>(out.data) % 4 == 0 && out.stride[0] % 2 == 0;
    return p;
}

// dtype: that of the result.
void check_product(const TensorRef& out, const TensorRef& x, const TensorRef& bias, DType dtype) {
    expect(x, "x", {kAny, kAny});
    require(x.shape[1] > 0, "x", "has no columns");
    expect(out, "out", {x.shape[0], kAny}, dtype);
    if (bias.given()) {
        expect(bias, "bias", {out.shape[1]}, dtype);
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
        check_product(out, x, bias, x.dtype);
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

std::int64_t chunks_of(std::int64_t columns) { return (columns + kChunkColumns - 1) / kChunkColumns; }

void at_16_bytes(const TensorRef& x, const char* name) {
    require(reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0, name, "does not lie at a multiple of 16 bytes");
}

// chunks: of each 16 rows.
void check_packed(const TensorRef& weight, PackedFormat format, std::int64_t rows, std::int64_t chunks) {
    const std::int64_t all = volume({(rows + kChunkRows - 1) / kChunkRows, chunks});
    expect(weight, "weight", {volume({all, packed_chunk_bytes(format)})}, DType::kU8);
    at_16_bytes(weight, "weight");
}

// body(Tag<T>) for float16 or bfloat16.
template <typename Body>
void with_16_bits(DType dtype, const char* name, Body body) {
    with_float(dtype, name, [&](auto tag) {
        if constexpr (std::is_same_v<typename decltype(tag)::Type, float>) {
            throw ArgumentError(name, "is float32, not float16 or bfloat16");
        } else {
            body(tag);
        }
    });
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
    with_16_bits(x.dtype, "x", [&](auto tag) {
        using T = typename decltype(tag)::Type;
        check_product(out, x, bias, x.dtype);
        require(x.shape[1] % 8 == 0, "x", "has columns that are no multiple of 8");
        require(whole_rows({&x}, 1), "x", "has rows that do not lie at multiples of 16 bytes");
        check_packed(weight, kind, out.shape[1], chunks_of(x.shape[1]));
        expect_apart(out, "out", {&x, &weight, &bias});
        if (out.size() == 0) {
            return;
        }
        const auto launch = kind == PackedFormat::kQ4       ? launch_packed<T, PackedFormat::kQ4>
                            : kind == PackedFormat::kQ4Mins ? launch_packed<T, PackedFormat::kQ4Mins>
                                                            : launch_packed<T, PackedFormat::kE4M3>;
        launch(out, x, weight, bias, as_stream(stream));
    });
}

void round_inputs(const TensorRef& out, const TensorRef& x, std::int64_t group, float scale, StreamHandle stream) {
    with_16_bits(x.dtype, "x", [&](auto tag) {
        using T = typename decltype(tag)::Type;
        expect(x, "x", {kAny, kAny});
        require(x.shape[1] > 0 && x.shape[1] % 8 == 0, "x", "has columns that are no multiple of 8");
        const std::int64_t chunks = chunks_of(x.shape[1]);
        expect(out, "out", {x.shape[0], volume({chunks, kFp8Bytes})}, DType::kU8);
        require(out.shape[1] <= kMostInInt, "x", "has too many columns");
        require(group >= 0 && group % kChunkColumns == 0, "group", "is no multiple of 64");
        require(scale >= 0.0F && std::isfinite(scale), "scale", "is negative or not finite");
        expect_dense(out, "out");
        at_16_bytes(out, "out");
        expect_apart(out, "out", {&x});
        if (out.size() == 0) {
            return;
        }
        const std::int64_t padded = chunks * kChunkColumns, each = group == 0 ? padded : std::min(group, padded);
        const std::int64_t groups = (padded + each - 1) / each;
        require(groups <= 65535, "group", "is too small for so many columns");  // the grid's second dimension
        const RoundParams<T> p{out.as<unsigned char>(),
                               x.as<T>(),
                               x.stride[0],
                               static_cast<int>(x.shape[1]),
                               static_cast<int>(chunks),
                               static_cast<int>(each),
                               scale,
                               whole_rows({&x}, 1)};
        const auto threads = static_cast<int>(std::min<std::int64_t>((each / 16 + 31) / 32 * 32, kLinearThreads));
        const dim3 grid(static_cast<unsigned>(x.shape[0]), static_cast<unsigned>(groups));
        launch(round_inputs_kernel<T>, grid, threads, kLinearThreads / 32 * sizeof(float), as_stream(stream), p);
    });
}

void linear_fp8(const TensorRef& out, const TensorRef& x, const TensorRef& weight, const TensorRef& bias,
                StreamHandle stream) {
    with_16_bits(out.dtype, "out", [&](auto tag) {
        using T = typename decltype(tag)::Type;
        expect(x, "x", {kAny, kAny}, DType::kU8);
        check_product(out, x, bias, out.dtype);
        require(x.shape[1] % kFp8Bytes == 0, "x", "has columns that are no multiple of 80");
        expect_dense(x, "x");
        at_16_bytes(x, "x");
        const std::int64_t chunks = x.shape[1] / kFp8Bytes;
        check_packed(weight, PackedFormat::kE4M3, out.shape[1], chunks);
        expect_apart(out, "out", {&x, &weight, &bias});
        if (out.size() == 0) {
            return;
        }
        auto p = params_of<Fp8Weight<T>>(out, x, bias);
        p.columns = static_cast<int>(chunks) * kChunkColumns;
        p.weight = {{weight.as<unsigned char>(), p.rows, p.columns}};
        launch_linear(p, as_stream(stream));
    });
}

}  // namespace octavo::cuda
