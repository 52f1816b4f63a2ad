#include <cstring>
#include <vector>

#include "element.h"
#include "octavo/checksum.h"
#include "ref.h"

namespace octavo::ref {
namespace {

using Bytes = std::vector<char>;

std::size_t block_bytes(const TensorRef& arena) {
    return static_cast<std::size_t>(arena.size() / (arena.shape[0] * arena.shape[1]) * size_of(arena.dtype));
}

std::size_t staged_bytes(const TensorRef& staging) {
    const std::int64_t all = staging.size() * size_of(staging.dtype);
    return static_cast<std::size_t>(all > 0 ? all / (staging.shape[0] * staging.shape[1]) : 0);
}

Bytes block(const TensorRef& arena, std::int64_t layer, std::int64_t id) {
    const char* from = at(arena, layer, id);
    return Bytes(from, from + block_bytes(arena));
}

void put_block(const TensorRef& arena, std::int64_t layer, std::int64_t id, const char* bytes) {
    std::memcpy(at(arena, layer, id), bytes, block_bytes(arena));
}

}  // namespace

void copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs) {
    check::copy_blocks(source, target, pairs);
    std::vector<Bytes> taken;
    for (std::int64_t i = 0; i < pairs.shape[0]; ++i) {
        for (std::int64_t layer = 0; layer < source.shape[0]; ++layer) {
            taken.push_back(block(source, layer, get_int(pairs, i, 0)));
        }
    }
    auto next = taken.begin();
    for (std::int64_t i = 0; i < pairs.shape[0]; ++i) {
        for (std::int64_t layer = 0; layer < source.shape[0]; ++layer) {
            put_block(target, layer, get_int(pairs, i, 1), (next++)->data());
        }
    }
}

void gather_blocks(const TensorRef& staging, const TensorRef& arena, const TensorRef& ids, std::int64_t begin) {
    check::staged_blocks(staging, arena, ids, begin);
    char* to = staging.as<char>();
    for (std::int64_t i = 0; i < ids.shape[0]; ++i) {
        for (std::int64_t layer = 0; layer < arena.shape[0]; ++layer) {
            const Bytes bytes = block(arena, layer, get_int(ids, i));
            for (std::size_t byte = 0; byte < staged_bytes(staging); ++byte) {
                *to++ = bytes[static_cast<std::size_t>(begin) + byte];
            }
        }
    }
}

void scatter_blocks(const TensorRef& arena, const TensorRef& staging, const TensorRef& ids, std::int64_t begin) {
    check::staged_blocks(staging, arena, ids, begin);
    const char* from = staging.as<char>();
    for (std::int64_t i = 0; i < ids.shape[0]; ++i) {
        for (std::int64_t layer = 0; layer < arena.shape[0]; ++layer) {
            Bytes bytes = block(arena, layer, get_int(ids, i));
            for (std::size_t byte = 0; byte < staged_bytes(staging); ++byte) {
                bytes[static_cast<std::size_t>(begin) + byte] = *from++;
            }
            put_block(arena, layer, get_int(ids, i), bytes.data());
        }
    }
}

void checksum_blocks(const TensorRef& sums, const TensorRef& arena, const TensorRef& ids) {
    check::checksum_blocks(sums, arena, ids);
    for (std::int64_t i = 0; i < ids.shape[0]; ++i) {
        std::uint64_t sum = 0;
        std::int64_t place = 0;
        for (std::int64_t layer = 0; layer < arena.shape[0]; ++layer) {
            Bytes bytes = block(arena, layer, get_int(ids, i));
            bytes.resize((bytes.size() + 7) / 8 * 8, 0);
            for (std::size_t begin = 0; begin < bytes.size(); begin += 8) {
                std::uint64_t word = 0;
                for (std::size_t j = 0; j < 8; ++j) {
                    word |= static_cast<std::uint64_t>(static_cast<unsigned char>(bytes[begin + j])) << 8 * j;
                }
                sum += checksum::mixed(word, place++);
            }
        }
        std::memcpy(at(sums, i), &sum, 8);
    }
}

}  // namespace octavo::ref
