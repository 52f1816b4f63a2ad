// Moves, gathers, scatters and checksums whole blocks, as bytes.
#include <algorithm>
#include <cstring>
#include <system_error>
#include <thread>
#include <unordered_set>
#include <vector>

#if defined(__linux__)
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "octavo/api.h"
#include "octavo/check.h"
#include "octavo/checksum.h"
#include "octavo/pool.h"

namespace octavo {
namespace {

// An arena [layers, n, ...]: where a block of a layer is, and its bytes.
struct Arena {
    Arena(const TensorRef& tensor, const char* name) {
        usable(tensor, name);
        require(tensor.ndim >= 3, name, "has fewer than three dimensions");
        TensorRef block = tensor;
        block.ndim = tensor.ndim - 2;
        std::copy(tensor.shape + 2, tensor.shape + tensor.ndim, block.shape);
        std::copy(tensor.stride + 2, tensor.stride + tensor.ndim, block.stride);
        require(block.size() > 0, name, "has empty blocks");
        if (tensor.size() > 0) {
            expect_dense(block, name);
            expect_apart(tensor, name, {});
        }
        const std::int64_t size = size_of(tensor.dtype);
        data = tensor.as<char>();
        layers = tensor.shape[0];
        blocks = tensor.shape[1];
        bytes = block.size() * size;
        layer_bytes = tensor.stride[0] * size;
        block_bytes = tensor.stride[1] * size;
    }
    char* at(std::int64_t layer, std::int64_t block) const { return data + layer * layer_bytes + block * block_bytes; }

    char* data;
    std::int64_t layers, blocks, bytes, layer_bytes, block_bytes;
};

void check_ids(const TensorRef& ids, const char* name, const Arena& arena, std::int64_t first, std::int64_t step) {
    for (std::int64_t i = first; i < ids.size(); i += step) {
        const std::int64_t id = ids.as<std::int64_t>()[i];
        require(id >= 0 && id < arena.blocks, name, "names a block that is not there");
    }
}

// That ids first, first + step ... of blocks that are written name none twice: who would be last is open.
void check_once(const TensorRef& ids, const char* name, std::int64_t first, std::int64_t step) {
    std::unordered_set<std::int64_t> seen;
    for (std::int64_t i = first; i < ids.size(); i += step) {
        require(seen.insert(ids.as<std::int64_t>()[i]).second, name, "writes a block twice");
    }
}

template <typename Body>
void each_block(std::int64_t count, const Arena& arena, Body&& body) {
    Pool::instance().run([&](PoolThread& thread) {
        thread.each(count * arena.layers, [&](std::int64_t i) { body(i / arena.layers, i % arena.layers); });
    });
}

// Whether a block is both read and written.
bool overlap(const std::int64_t* pairs, std::int64_t count) {
    std::unordered_set<std::int64_t> read;
    for (std::int64_t i = 0; i < count; ++i) {
        read.insert(pairs[2 * i]);
    }
    for (std::int64_t i = 0; i < count; ++i) {
        if (read.count(pairs[2 * i + 1]) != 0) {
            return true;
        }
    }
    return false;
}

// Of a layer of a block, whose first word is at `place`.
std::uint64_t checksum_of(const char* bytes, std::int64_t length, std::int64_t place) {
    std::uint64_t sum = 0, word = 0;
    const std::int64_t whole = length / checksum::kWordBytes, rest = length % checksum::kWordBytes;
    for (std::int64_t i = 0; i < whole; ++i) {
        std::memcpy(&word, bytes + i * checksum::kWordBytes, sizeof word);
        sum += checksum::mixed(word, place + i);
    }
    if (rest > 0) {
        word = 0;
        std::memcpy(&word, bytes + length - rest, static_cast<std::size_t>(rest));
        sum += checksum::mixed(word, place + whole);
    }
    return sum;
}

}  // namespace

void check::copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs) {
    const Arena from(source, "source"), to(target, "target");
    require(from.layers == to.layers && from.bytes == to.bytes && source.dtype == target.dtype, "target",
            "has blocks of another form than the source");
    expect(pairs, "pairs", {kAny, 2}, DType::kI64);
    expect_dense(pairs, "pairs");
    check_ids(pairs, "pairs", from, 0, 2);
    check_ids(pairs, "pairs", to, 1, 2);
    check_once(pairs, "pairs", 1, 2);
    expect_apart_or_same(target, "target", {&source});
    expect_apart(target, "target", {&pairs});
}

void copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs) {
    check::copy_blocks(source, target, pairs);
    const Arena from(source, "source"), to(target, "target");
    const auto* ids = pairs.as<std::int64_t>();
    const std::int64_t count = pairs.shape[0];
    const auto size = static_cast<std::size_t>(from.bytes);
    if (from.data != to.data || !overlap(ids, count)) {
        each_block(count, from, [&](std::int64_t i, std::int64_t layer) {
            std::memcpy(to.at(layer, ids[2 * i + 1]), from.at(layer, ids[2 * i]), size);
        });
        return;
    }
    std::vector<char> held(static_cast<std::size_t>(count) * size);
    for (std::int64_t layer = 0; layer < from.layers; ++layer) {
        for (std::int64_t i = 0; i < count; ++i) {
            std::memcpy(held.data() + static_cast<std::size_t>(i) * size, from.at(layer, ids[2 * i]), size);
        }
        for (std::int64_t i = 0; i < count; ++i) {
            std::memcpy(to.at(layer, ids[2 * i + 1]), held.data() + static_cast<std::size_t>(i) * size, size);
        }
    }
}

namespace {

std::int64_t staged_bytes(const TensorRef& staging) {
    return volume({staging.size(), size_of(staging.dtype)}) / (staging.shape[0] * staging.shape[1]);
}

}  // namespace

void check::staged_blocks(const TensorRef& staging, const TensorRef& arena, const TensorRef& ids, std::int64_t begin) {
    const Arena blocks(arena, "arena");
    expect(ids, "ids", {kAny}, DType::kI64);
    usable(staging, "staging");
    expect_dense(staging, "staging");
    check_ids(ids, "ids", blocks, 0, 1);
    require(staging.ndim >= 2 && staging.shape[0] == ids.shape[0] && staging.shape[1] == blocks.layers, "staging",
            "is not [ids, layers, ...]");
    require(begin >= 0 && begin <= blocks.bytes, "begin", "is not in a block");
    require(staging.size() == 0 || staged_bytes(staging) <= blocks.bytes - begin, "staging",
            "covers bytes that a block does not have");
    expect_apart(staging, "staging", {&arena, &ids});
    expect_apart(arena, "arena", {&ids});
}

void check::scatter_blocks(const TensorRef& arena, const TensorRef& staging, const TensorRef& ids, std::int64_t begin) {
    check::staged_blocks(staging, arena, ids, begin);
    check_once(ids, "ids", 0, 1);
}

void gather_blocks(const TensorRef& staging, const TensorRef& arena, const TensorRef& ids, std::int64_t begin) {
    check::staged_blocks(staging, arena, ids, begin);
    const Arena from(arena, "arena");
    if (staging.size() == 0) {
        return;  // it may have no memory
    }
    const std::int64_t bytes = staged_bytes(staging);
    each_block(ids.shape[0], from, [&](std::int64_t i, std::int64_t layer) {
        std::memcpy(staging.as<char>() + (i * from.layers + layer) * bytes,
                    from.at(layer, ids.as<std::int64_t>()[i]) + begin, static_cast<std::size_t>(bytes));
    });
}

void scatter_blocks(const TensorRef& arena, const TensorRef& staging, const TensorRef& ids, std::int64_t begin) {
    check::scatter_blocks(arena, staging, ids, begin);
    const Arena to(arena, "arena");
    if (staging.size() == 0) {
        return;  // it may have no memory
    }
    const std::int64_t bytes = staged_bytes(staging);
    each_block(ids.shape[0], to, [&](std::int64_t i, std::int64_t layer) {
        std::memcpy(to.at(layer, ids.as<std::int64_t>()[i]) + begin,
                    staging.as<char>() + (i * to.layers + layer) * bytes, static_cast<std::size_t>(bytes));
    });
}

void check::checksum_blocks(const TensorRef& sums, const TensorRef& arena, const TensorRef& ids) {
    expect(ids, "ids", {kAny}, DType::kI64);
    expect(sums, "sums", {ids.shape[0]}, DType::kI64);
    check_ids(ids, "ids", Arena(arena, "arena"), 0, 1);
    expect_apart(sums, "sums", {&arena, &ids});
}

void checksum_blocks(const TensorRef& sums, const TensorRef& arena, const TensorRef& ids) {
    check::checksum_blocks(sums, arena, ids);
    const Arena from(arena, "arena");
    Pool::instance().run([&](PoolThread& thread) {
        thread.each(ids.shape[0], [&](std::int64_t i) {
            std::uint64_t sum = 0;
            for (std::int64_t layer = 0; layer < from.layers; ++layer) {
                sum += checksum_of(from.at(layer, ids.as<std::int64_t>()[i]), from.bytes,
                                   layer * checksum::words_of(from.bytes));
            }
            sums.as<std::int64_t>()[i] = static_cast<std::int64_t>(sum);
        });
    });
}

void check::populate_blocks(const TensorRef& arena, std::int64_t first, std::int64_t end) {
    const Arena all(arena, "arena");
    require(first >= 0 && first <= end && end <= all.blocks, "end", "names blocks that are not there");
}

namespace {

// Connections of a killed process break when the last thread that has its files has ended. On a busy machine one of the
// lowest priority ends seconds after the others, so it has none. It never runs Python, which might close one here.
void become_least() {
#if defined(__linux__)
#if defined(SYS_close_range)
    constexpr unsigned kUnshare = 2;
    syscall(SYS_close_range, 0U, ~0U, kUnshare);
#endif
    setpriority(PRIO_PROCESS, static_cast<id_t>(syscall(SYS_gettid)), 19);
#endif
}

void touch(const Arena& all, std::int64_t first, std::int64_t end) {
    constexpr std::uintptr_t kPage = 4096;
    for (std::int64_t layer = 0; layer < all.layers && first < end; ++layer) {
        char* p = all.at(layer, first);
        const auto length = static_cast<std::uintptr_t>(all.at(layer, end - 1) + all.bytes - p);
        const std::uintptr_t ahead = reinterpret_cast<std::uintptr_t>(p) % kPage;  // blocks may begin inside a page
        for (std::uintptr_t at = 0; at < length; at = (at + ahead) / kPage * kPage + kPage - ahead) {
            char byte = __atomic_load_n(p + at, __ATOMIC_RELAXED);  // a write that changes nothing, whoever writes
            __atomic_compare_exchange_n(p + at, &byte, byte, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
        }
    }
}

}  // namespace

void populate_blocks(const TensorRef& arena, std::int64_t first, std::int64_t end) {
    check::populate_blocks(arena, first, end);
    const Arena all(arena, "arena");
    try {
        std::thread([&] {
            become_least();
            touch(all, first, end);
        }).join();
    } catch (const std::system_error&) {  // there are as many threads as may be: steps fault in what they come to
    }
}

}  // namespace octavo
