// What the front of a group tells its other hosts between steps (see octavo/group_hosts.h): blocks that were written
// there, to each what it reads of them, and adapters.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "octavo/api.h"
#include "octavo/check.h"
#include "octavo/group_hosts.h"

namespace octavo {
namespace {

constexpr std::int64_t kMirrored = 16;                     // blocks, at once
constexpr std::int64_t kMostTold = std::int64_t{4} << 20;  // bytes of adapters, at once

// What is said of blocks to another host: their number, their ids, and its bytes of them, layer by layer.
TensorRef ids_in(char* said, std::int64_t count) {
    TensorRef ids;
    ids.data = said + 8;
    ids.dtype = DType::kI64;
    ids.ndim = 1;
    ids.shape[0] = count;
    ids.stride[0] = 1;
    return ids;
}

TensorRef staging_in(char* said, std::int64_t layers, std::int64_t row, std::int64_t count) {
    TensorRef staging;
    staging.data = said + 8 + 8 * count;
    staging.dtype = DType::kU8;
    staging.ndim = 3;
    const std::int64_t shape[] = {count, layers, row};
    for (int i = 0; i < 3; ++i) {
        staging.shape[i] = shape[i];
        staging.stride[i] = i == 0 ? layers * row : i == 1 ? row : 1;
    }
    return staging;
}

}  // namespace

// At least one: a test's host may have none.
std::int64_t GroupHosts::all_heads() const {
    std::int64_t all = 1;
    for (const Span& heads : kv_heads_) {
        all = std::max(all, heads.first + heads.count);
    }
    return all;
}

GroupHosts::Slice GroupHosts::slice_of(const TensorRef& arena, int host) const {
    const Span &layers = layers_[static_cast<std::size_t>(host)], &heads = kv_heads_[static_cast<std::size_t>(host)];
    const std::int64_t head = arena.size() * size_of(arena.dtype) / (arena.shape[0] * arena.shape[1]) / all_heads();
    Slice slice{arena, heads.first * head, heads.count * head};
    slice.layers.data = arena.as<char>() + layers.first * arena.stride[0] * size_of(arena.dtype);
    slice.layers.shape[0] = layers.count;
    return slice;
}

// Puts what this host has of blocks where it belongs.
bool GroupHosts::take_blocks(const TensorRef& arena, std::int64_t bytes) {
    const Slice slice = slice_of(arena, host());
    const std::int64_t each = 8 + slice.block_bytes(), count = (bytes - 8) / each;
    if (count < 1 || count > std::min(kMirrored, arena.shape[1]) || bytes != 8 + count * each) {
        return links_.refuse(0);
    }
    std::vector<char> said(static_cast<std::size_t>(bytes));
    if (!links_.read(said.data(), bytes)) {
        return false;
    }
    try {
        const TensorRef staging = staging_in(said.data(), slice.layers.shape[0], slice.bytes, count);
        scatter_blocks(slice.layers, staging, ids_in(said.data(), count), slice.begin);
    } catch (const ArgumentError&) {  // ids of no blocks
        return links_.refuse(0);
    }
    return true;
}

void GroupHosts::check_arena(const TensorRef& arena) const {
    usable(arena, "arena");
    require(arena.ndim >= 3 && arena.size() > 0, "arena", "has no blocks");
    const Span& last = layers_.back();
    require(arena.shape[0] >= last.first + last.count, "arena", "has too few layers");
    const std::int64_t block = arena.size() * size_of(arena.dtype) / (arena.shape[0] * arena.shape[1]);
    require(block % all_heads() == 0, "arena", "has blocks that heads do not divide");
    char nothing[8];
    check::staged_blocks(staging_in(nothing, arena.shape[0], 1, 0), arena, ids_in(nothing, 0), 0);
}

void GroupHosts::mirror(const TensorRef& arena, const TensorRef& ids) {
    require(speaks() && host() == 0, "hosts", "are not those of the front");
    expect(ids, "ids", {kAny}, DType::kI64);
    check_arena(arena);
    for (std::int64_t first = 0; first < ids.shape[0]; first += kMirrored) {
        const std::int64_t count = std::min(kMirrored, ids.shape[0] - first);
        for (int other = 1; other < size(); ++other) {
            const Slice slice = slice_of(arena, other);
            if (slice.block_bytes() == 0) {
                continue;
            }
            char* said = links_.begin(other, Frame::kBlocks, 8 + count * (8 + slice.block_bytes()));
            std::memcpy(said, &count, 8);
            std::memcpy(said + 8, ids.as<std::int64_t>() + first, static_cast<std::size_t>(8 * count));
            const TensorRef staging = staging_in(said, slice.layers.shape[0], slice.bytes, count);
            gather_blocks(staging, slice.layers, ids_in(said, count), slice.begin);
            if (!links_.send_begun(other)) {
                throw std::runtime_error(team_.trouble());
            }
        }
    }
}

void GroupHosts::keep_adapters(const TensorRef& memory) {
    expect(memory, "memory", {kAny}, DType::kU8);
    adapters_ = memory;
}

bool GroupHosts::tell_adapters(const Span& bytes) {
    require(bytes.within(adapters_.shape[0]), "bytes", "are not those of adapters");
    std::vector<char> said;
    for (std::int64_t first = bytes.first; first < bytes.first + bytes.count; first += kMostTold) {
        const std::int64_t count = std::min(kMostTold, bytes.first + bytes.count - first);
        said.resize(static_cast<std::size_t>(8 + count));
        std::memcpy(said.data(), &first, 8);
        std::memcpy(said.data() + 8, adapters_.as<char>() + first, static_cast<std::size_t>(count));
        if (!links_.tell(Frame::kAdapter, said.data(), 8 + count)) {
            return false;
        }
    }
    return true;
}

bool GroupHosts::take_adapter(std::int64_t bytes) {
    if (bytes <= 8 || bytes > 8 + kMostTold) {
        return links_.refuse(0);
    }
    std::vector<char> said(static_cast<std::size_t>(bytes));
    if (!links_.read(said.data(), bytes)) {
        return false;
    }
    Span place{0, bytes - 8};
    std::memcpy(&place.first, said.data(), 8);
    if (!place.within(adapters_.shape[0])) {
        return links_.refuse(0);
    }
    std::memcpy(adapters_.as<char>() + place.first, said.data() + 8, static_cast<std::size_t>(place.count));
    return true;
}

}  // namespace octavo
