// Keys and values on their way into pages, out of them, and from one form into another.
#include <cmath>
#include <cstring>
#include <vector>

#include "kv_pages.h"
#include "octavo/check.h"
#include "octavo/pool.h"
#include "rope.h"

namespace octavo {
namespace {

constexpr std::int64_t kPiece = 4096;  // numbers a lane converts at once

const char* row_at(const TensorRef& x, std::int64_t token, std::int64_t head) {
    return x.as<char>() + (token * x.stride[0] + head * x.stride[1]) * size_of(x.dtype);
}

KvPages check_tokens(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots) {
    expect(keys, "keys", {kAny, kAny, kAny});
    const KvPages pages = kv_pages(kv, keys.shape[2]);
    require(keys.is_float(), "keys", "must be floats");
    expect(keys, "keys", {kAny, pages.num_heads, pages.head_dim});
    expect(values, "values", {keys.shape[0], pages.num_heads, pages.head_dim}, keys.dtype);
    check_slots(slots, "slots", keys.shape[0], pages);
    expect_apart(kv, "kv", {&keys, &values, &slots});
    return pages;
}

// Whether elements may be moved as they are.
bool alike(const KvPages& a, const KvPages& b) {
    const auto plain = [](const KvSide& side) { return side.scales == nullptr && side.slot_scales == nullptr; };
    return a.dtype == b.dtype && plain(a.keys) && plain(a.values) && plain(b.keys) && plain(b.values);
}

std::int64_t dimension(const KvSide& side, std::int64_t i) { return i / side.run * side.outer + i % side.run; }

void move_slot(const KvPages& pages, const KvSide& to, const KvSide& from, std::int64_t block, std::int64_t head,
               std::int64_t slot) {
    const std::int64_t size = size_of(pages.dtype);
    char* target = to.data + (block * to.block + head * to.head + slot * to.slot) * size;
    const char* source = from.data + (block * from.block + head * from.head + slot * from.slot) * size;
    const std::int64_t run = to.run < from.run ? to.run : from.run;
    for (std::int64_t i = 0; i < pages.head_dim; i += run) {
        std::memmove(target + dimension(to, i) * size, source + dimension(from, i) * size,
                     static_cast<std::size_t>(run * size));
    }
}

}  // namespace

void check::cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots) {
    check_tokens(kv, keys, values, slots);
}

void cache_write(const KvCache& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots) {
    const KvPages pages = check_tokens(kv, keys, values, slots);
    if (keys.size() == 0) {
        return;
    }
    const std::int64_t dim = pages.head_dim, size = pages.block_size;
    Pool::instance().run([&](Lane& lane) {
        lane.each(keys.shape[0], [&](std::int64_t token) {
            const std::int64_t slot = slots.as<std::int64_t>()[token];
            float* wide = lane.scratch(dim);
            for (std::int64_t head = 0; slot >= 0 && head < pages.num_heads; ++head) {
                kernels().to_float(keys.dtype, row_at(keys, token, head), dim, wide);
                kernels().write_slot(pages, pages.keys, slot / size, head, slot % size, wide);
                kernels().to_float(values.dtype, row_at(values, token, head), dim, wide);
                kernels().write_slot(pages, pages.values, slot / size, head, slot % size, wide);
            }
        });
    });
}

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

void check::rope_cache_write(const KvCache& kv, const TensorRef& queries, const TensorRef& keys,
                             const TensorRef& values, const TensorRef& positions, const TensorRef& cos,
                             const TensorRef& sin, std::int64_t rotated, const TensorRef& slots) {
    const KvPages pages = check_tokens(kv, keys, values, slots);
    expect(queries, "queries", {keys.shape[0], kAny, pages.head_dim}, keys.dtype);
    expect_angles(positions, cos, sin, rotated, keys.shape[0], pages.head_dim);
    expect_apart(queries, "queries", {&keys, &values, &positions, &cos, &sin, &slots, &kv.keys, &kv.values});
    expect_apart(queries, "queries", {&kv.key_scale, &kv.value_scale});
    expect_apart(kv, "kv", {&positions, &cos, &sin});
}

void rope_cache_write(const KvCache& kv, const TensorRef& queries, const TensorRef& keys, const TensorRef& values,
                      const TensorRef& positions, const TensorRef& cos, const TensorRef& sin, std::int64_t rotated,
                      const TensorRef& slots, bool interleaved) {
    check::rope_cache_write(kv, queries, keys, values, positions, cos, sin, rotated, slots);
    if (keys.shape[0] == 0 || keys.shape[2] == 0) {
        return;
    }
    const KvPages pages = kv_pages(kv, keys.shape[2]);
    const std::int64_t dim = pages.head_dim, size = pages.block_size;
    Pool::instance().run([&](Lane& lane) {
        lane.each(keys.shape[0], [&](std::int64_t token) {
            const Rope rope = rope_of(positions, cos, sin, rotated, token, interleaved);
            float *head = lane.scratch(2 * dim), *space = head + dim;
            for (std::int64_t h = 0; h < queries.shape[1]; ++h) {
                char* query = const_cast<char*>(row_at(queries, token, h));
                kernels().to_float(queries.dtype, query, dim, head);
                turn(kernels(), rope, head, space);
                kernels().from_float(queries.dtype, head, dim, query);
            }
            const std::int64_t slot = slots.as<std::int64_t>()[token];
            for (std::int64_t h = 0; slot >= 0 && h < pages.num_heads; ++h) {
                kernels().to_float(keys.dtype, row_at(keys, token, h), dim, head);
                turn(kernels(), rope, head, space);
                kernels().write_slot(pages, pages.keys, slot / size, h, slot % size, head);
                kernels().to_float(values.dtype, row_at(values, token, h), dim, head);
                kernels().write_slot(pages, pages.values, slot / size, h, slot % size, head);
            }
        });
    });
}

void check::convert_layout(const KvCache& target, const KvCache& source, const TensorRef& ids) {
    const KvPages from = kv_pages(source, KvNames("source")), to = kv_pages(target, KvNames("target"));
    require(to.num_blocks == from.num_blocks && to.num_heads == from.num_heads && to.block_size == from.block_size &&
                to.head_dim == from.head_dim,
            "target", "has another form than source");
    if (ids.given()) {
        expect(ids, "ids", {kAny}, DType::kI64);
        for (std::int64_t i = 0; i < ids.shape[0]; ++i) {
            const std::int64_t id = ids.as<std::int64_t>()[i];
            require(id >= 0 && id < from.num_blocks, "ids", "names a block that is not there");
        }
    }
    expect_apart(target, "target", {&ids, &source.key_scale, &source.value_scale});
    expect_apart_or_same(target.keys, "target", {&source.keys});
    expect_apart(target.keys, "target", {&source.values});
    if (target.values.given()) {
        expect_apart_or_same(target.values, "target", {&source.values});
        expect_apart(target.values, "target", {&source.keys});
    }
}

void convert_layout(const KvCache& target, const KvCache& source, const TensorRef& ids) {
    check::convert_layout(target, source, ids);
    if (source.keys.size() == 0) {
        return;
    }
    const KvPages from = kv_pages(source, KvNames("source")), to = kv_pages(target, KvNames("target"));
    const bool as_they_are = alike(from, to);
    const std::int64_t count = ids.given() ? ids.shape[0] : from.num_blocks;
    Pool::instance().run([&](Lane& lane) {
        lane.each(count * from.num_heads, [&](std::int64_t i) {
            const std::int64_t place = i / from.num_heads, head = i % from.num_heads;
            const std::int64_t block = ids.given() ? ids.as<std::int64_t>()[place] : place;
            float* row = lane.scratch(from.head_dim);
            for (std::int64_t slot = 0; slot < from.block_size; ++slot) {
                for (KvSide KvPages::* side : {&KvPages::keys, &KvPages::values}) {
                    if (as_they_are) {
                        move_slot(from, to.*side, from.*side, block, head, slot);
                    } else {
                        kernels().read_slot(from, from.*side, block, head, slot, row);
                        kernels().write_slot(to, to.*side, block, head, slot, row);
                    }
                }
            }
        });
    });
}

void check::convert_fp8(const TensorRef& target, const TensorRef& source, float scale, const std::string& type) {
    expect_dense(target, "target");
    expect_dense(source, "source");
    require(target.size() == source.size(), "target", "has another number of elements than source");
    const bool narrow = size_of(target.dtype) == 1;
    require(narrow || size_of(source.dtype) == 1, "source", "neither it nor the target holds 8-bit numbers");
    require((narrow ? source : target).is_float(), narrow ? "source" : "target", "must be floats");
    require(scale > 0 && std::isfinite(scale), "scale", "is not positive and finite");
    eight_bits_named(type, "type");
    expect_apart(target, "target", {&source});
}

void convert_fp8(const TensorRef& target, const TensorRef& source, float scale, const std::string& type) {
    check::convert_fp8(target, source, scale, type);
    const bool narrow = size_of(target.dtype) == 1;
    const DType bytes = eight_bits_named(type, "type");
    const DType from = narrow ? source.dtype : bytes, to = narrow ? bytes : target.dtype;
    const float factor = narrow ? 1.0F / scale : scale;
    const std::int64_t count = source.size();
    Pool::instance().run([&](Lane& lane) {
        lane.each((count + kPiece - 1) / kPiece, [&](std::int64_t piece) {
            const std::int64_t first = piece * kPiece, some = count - first < kPiece ? count - first : kPiece;
            float* wide = lane.scratch(kPiece);
            kernels().to_float(from, source.as<char>() + first * size_of(source.dtype), some, wide);
            for (std::int64_t i = 0; i < some; ++i) {
                wide[i] *= factor;
            }
            kernels().from_float(to, wide, some, target.as<char>() + first * size_of(target.dtype));
        });
    });
}

}  // namespace octavo
