#include "cache.cuh"

#include <cmath>

#include "common/angles.h"
#include "common/arena.h"
#include "common/dispatch.h"
#include "common/kv_cache.h"
#include "device.h"

namespace octavo::cuda {
namespace {

bool whole_pages(const KvLayer& layer, const KvCache& kv) {
    if (layer.contiguous) {
        return layer.head_dim % 8 == 0 && whole_rows({&kv.keys, &kv.values}, 3);
    }
    return false;
}

template <typename T>
WriteParams<T> write_params(const KvLayer& layer, const KvCache& kv, const TensorRef& keys, const TensorRef& values,
                            const TensorRef& slots) {
    expect(keys, "key", {kAny, layer.num_heads, layer.head_dim});
    expect(values, "value", {keys.shape[0], layer.num_heads, layer.head_dim}, keys.dtype);
    expect(slots, "slot_mapping", {keys.shape[0]}, DType::kI64);
    expect_writable(kv, {&keys, &values, &slots});
    return {keys.as<T>(),
            values.as<T>(),
            slots.as<std::int64_t>(),
            keys.stride[0],
            keys.stride[1],
            values.stride[0],
            values.stride[1],
            std::int64_t{layer.num_blocks} * layer.pages.block_size,
            layer.pages,
            layer.scales,
            fault_word(),
            layer.num_heads,
            layer.head_dim,
            whole_pages(layer, kv) && whole_rows({&keys, &values}, 2)};
}

// The layer that activations of this type are written to.
KvLayer layer_of(const KvCache& kv, const TensorRef& activations) {
    usable(activations, "key");
    require(activations.is_float(), "key", "is not of a float type");
    return make_kv_layer(kv, activations.dtype);
}

dim3 per_row(const TensorRef& t) { return dim3(static_cast<unsigned>(t.shape[0])); }

void move(const MoveParams& p, int max_ctas, StreamHandle stream) {
    if (p.num_items == 0 || p.num_layers == 0 || p.length == 0) {
        return;
    }
    const auto places = reinterpret_cast<std::uintptr_t>(p.from) | reinterpret_cast<std::uintptr_t>(p.to) |
                        static_cast<std::uintptr_t>(p.from_layer | p.from_block | p.to_layer | p.to_block | p.length);
    const std::int64_t runs = std::int64_t{p.num_items} * p.num_layers;
    dim3 grid(static_cast<unsigned>(std::min<std::int64_t>(runs, max_ctas > 0 ? max_ctas : 1 << 20)));
    if (max_ctas <= 0 && runs < 264) {  // few blocks: several thread blocks for each
        grid.y = static_cast<unsigned>(std::clamp<std::int64_t>(p.length / (64 * kCacheThreads), 1, 264 / runs));
    }
    if (places % 16 == 0) {
        launch(move_blocks_kernel<uint4>, grid, kCacheThreads, 0, as_stream(stream), p);
    } else if (places % 4 == 0) {
        launch(move_blocks_kernel<std::uint32_t>, grid, kCacheThreads, 0, as_stream(stream), p);
    } else {
        launch(move_blocks_kernel<unsigned char>, grid, kCacheThreads, 0, as_stream(stream), p);
    }
}

void move_staged(const TensorRef& arena, const TensorRef& ids, const TensorRef& staging, std::int64_t begin,
                 StreamHandle stream, bool gather) {
    const Arena a = as_arena(arena, "arena");
    expect(ids, "ids", {kAny}, DType::kI64);
    expect(staging, "staging", {ids.shape[0], a.num_layers, kAny}, DType::kU8);
    const std::int64_t length = staging.shape[2];
    require(begin >= 0 && begin <= a.length, "begin", "is no place in a block");
    require(length <= a.length - begin, "staging", "covers bytes that a block does not have");
    expect_apart(gather ? staging : arena, gather ? "staging" : "arena", {&ids, gather ? &arena : &staging});
    MoveParams p{};
    p.fault = fault_word();
    p.num_from = gather ? a.num_blocks : ids.shape[0];
    p.num_to = gather ? ids.shape[0] : a.num_blocks;
    p.ids = ids.as<std::int64_t>();
    p.gather = gather;
    p.length = length;
    p.num_items = static_cast<int>(ids.shape[0]);
    p.num_layers = static_cast<int>(a.num_layers);
    auto* staged = staging.as<unsigned char>();
    p.from = gather ? a.data + begin : staged;
    p.to = gather ? staged : a.data + begin;
    p.from_layer = gather ? a.layer : staging.stride[1];
    p.from_block = gather ? a.block : staging.stride[0];
    p.to_layer = gather ? staging.stride[1] : a.layer;
    p.to_block = gather ? staging.stride[0] : a.block;
    move(p, 0, stream);
}

}  // namespace

void cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots,
                 StreamHandle stream) {
    const KvLayer layer = layer_of(kv, keys);
    with_kv(keys.dtype, layer.type, "key", [&](auto t, auto c) {
        using T = typename decltype(t)::Type;
        using C = typename decltype(c)::Type;
        const WriteParams<T> params = write_params<T>(layer, kv, keys, values, slots);
        if (keys.size() > 0) {
            launch(cache_write_kernel<T, C>, per_row(keys), kCacheThreads, 0, as_stream(stream), params);
        }
    });
}

void rope_cache_write(const KvCache& kv, const TensorRef& queries, const TensorRef& keys, const TensorRef& values,
                      const TensorRef& positions, const TensorRef& cos, const TensorRef& sin, int rotated,
                      const TensorRef& slots, bool interleaved, StreamHandle stream) {
    const KvLayer layer = layer_of(kv, keys);
    with_kv(keys.dtype, layer.type, "key", [&](auto t, auto c) {
        using T = typename decltype(t)::Type;
        using C = typename decltype(c)::Type;
        const auto start = [&](auto angle) {
            using A = typename decltype(angle)::Type;
            RopeParams<T, A> params{};
            params.write = write_params<T>(layer, kv, keys, values, slots);
            expect(queries, "query", {keys.shape[0], kAny, layer.head_dim}, keys.dtype);
            expect_angles(positions, cos, sin, keys.shape[0], rotated, layer.head_dim);
            require(volume({queries.shape[1], layer.head_dim}) <= kMostInInt, "query", "has too many heads");
            expect_apart(
                queries, "query",
                {&keys, &values, &positions, &cos, &sin, &slots, &kv.keys, &kv.values, &kv.key_scale, &kv.value_scale});
            expect_writable(kv, {&positions, &cos, &sin});
            params.num_angles = cos.shape[0];
            params.queries = queries.as<T>();
            params.positions = positions.as<std::int64_t>();
            params.cos = cos.as<A>();
            params.sin = sin.as<A>();
            params.query_token = queries.stride[0];
            params.query_head = queries.stride[1];
            params.cos_row = cos.stride[0];
            params.sin_row = sin.stride[0];
            params.num_query_heads = static_cast<int>(queries.shape[1]);
            params.half = rotated / 2;
            params.interleaved = interleaved;
            const std::size_t shared = sizeof(T) * static_cast<std::size_t>(layer.num_heads * layer.head_dim);
            require(fits_shared(shared), "key", "has more numbers per token than shared memory holds");
            if (keys.size() > 0) {
                launch(rope_cache_write_kernel<T, C, A>, per_row(keys), kCacheThreads, shared, as_stream(stream),
                       params);
            }
        };
        if (cos.dtype == keys.dtype) {
            start(t);
        } else {
            require(cos.dtype == DType::kF32, "cos", "is neither float32 nor of the keys' type");
            start(Tag<float>{});
        }
    });
}

void copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs, int num_ctas,
                 StreamHandle stream) {
    const Arena from = as_arena(source, "source"), to = as_arena(target, "target");
    require(from.length == to.length && from.num_layers == to.num_layers, "target", "has another form than source");
    expect(pairs, "pairs", {kAny, 2}, DType::kI64);
    expect_dense(pairs, "pairs");
    expect_apart(target, "target", {&pairs});
    expect_apart_or_same(target, "target", {&source});
    MoveParams p{};
    p.fault = fault_word();
    p.num_from = from.num_blocks;
    p.num_to = to.num_blocks;
    p.from = from.data;
    p.to = to.data;
    p.pairs = pairs.as<std::int64_t>();
    p.from_layer = from.layer;
    p.from_block = from.block;
    p.to_layer = to.layer;
    p.to_block = to.block;
    p.length = from.length;
    p.num_items = static_cast<int>(pairs.shape[0]);
    p.num_layers = static_cast<int>(from.num_layers);
    move(p, num_ctas, stream);
}

void gather_blocks(const TensorRef& arena, const TensorRef& ids, const TensorRef& staging, std::int64_t begin,
                   StreamHandle stream) {
    move_staged(arena, ids, staging, begin, stream, true);
}

void scatter_blocks(const TensorRef& arena, const TensorRef& ids, const TensorRef& staging, std::int64_t begin,
                    StreamHandle stream) {
    move_staged(arena, ids, staging, begin, stream, false);
}

void checksum_blocks(const TensorRef& arena, const TensorRef& ids, const TensorRef& out, StreamHandle stream) {
    const Arena a = as_arena(arena, "arena");
    expect(ids, "ids", {kAny}, DType::kI64);
    expect(out, "out", {ids.shape[0]}, DType::kI64);
    expect_apart(out, "out", {&arena, &ids});
    const auto address = static_cast<std::int64_t>(reinterpret_cast<std::uintptr_t>(a.data));
    const bool aligned = (a.layer | a.block | address) % checksum::kWordBytes == 0;
    const ChecksumParams p{
        a.data,       ids.as<std::int64_t>(), out.as<std::uint64_t>(),        a.layer, a.block, a.length,
        a.num_blocks, fault_word(),           static_cast<int>(a.num_layers), aligned};
    if (ids.shape[0] > 0) {
        launch(checksum_kernel, per_row(ids), kCacheThreads, 128, as_stream(stream), p);
    }
}

void convert_fp8(const TensorRef& target, const TensorRef& source, float scale, const std::string& type,
                 StreamHandle stream) {
    const bool narrow = size_of(target.dtype) == 1;
    const TensorRef &wide = narrow ? source : target, &bytes = narrow ? target : source;
    expect_dense(target, "target");
    expect_dense(source, "source");
    require(size_of(bytes.dtype) == 1, "source", "neither it nor the target holds 8-bit numbers");
    require(wide.is_float(), narrow ? "source" : "target", "is not of a float type");
    require(std::isfinite(scale) && scale > 0, "scale", "is not positive and finite");
    expect_apart(target, "target", {&source});
    require(target.size() == source.size(), "target", "has another number of elements than source");
    const KvType kv = kv_type_named(type);
    require(kv != KvType::kSame, "kv_dtype", "is auto: say which 8-bit numbers");
    const std::int64_t count = target.size();
    if (count == 0) {
        return;
    }
    const bool whole = whole_rows({&source, &target}, 0);
    const std::int64_t work = whole ? count / 8 + count % 8 : count;
    const dim3 grid(static_cast<unsigned>(std::min<std::int64_t>((work + kCacheThreads - 1) / kCacheThreads, 2048)));
    with_kv(wide.dtype, kv, "source", [&](auto t, auto c) {
        using T = typename decltype(t)::Type;
        using C = typename decltype(c)::Type;
        if (narrow) {
            launch(convert_kernel<true, T, C>, grid, kCacheThreads, 0, as_stream(stream), wide.as<T>(), bytes.as<C>(),
                   count, scale, whole);
        } else {
            launch(convert_kernel<false, C, T>, grid, kCacheThreads, 0, as_stream(stream), bytes.as<C>(), wide.as<T>(),
                   count, scale, whole);
        }
    });
}

}  // namespace octavo::cuda
