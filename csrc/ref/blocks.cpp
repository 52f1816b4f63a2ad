#include <cstring>
#include <vector>

#include "element.h"
#include "ref.h"

namespace octavo::ref {
namespace {

using Bytes = std::vector<char>;

std::size_t block_bytes(const TensorRef& arena) {
    return static_cast<std::size_t>(arena.size() / (arena.shape[0] * arena.shape[1]) * size_of(arena.dtype));
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

void gather_blocks(const TensorRef& packed, const TensorRef& arena, const TensorRef& ids) {
    check::packed_blocks(packed, arena, ids);
    char* to = packed.as<char>();
    for (std::int64_t i = 0; i < ids.shape[0]; ++i) {
        for (std::int64_t layer = 0; layer < arena.shape[0]; ++layer) {
            for (const char byte : block(arena, layer, get_int(ids, i))) {
                *to++ = byte;
            }
        }
    }
}

void scatter_blocks(const TensorRef& arena, const TensorRef& packed, const TensorRef& ids) {
    check::packed_blocks(packed, arena, ids);
    const char* from = packed.as<char>();
    for (std::int64_t i = 0; i < ids.shape[0]; ++i) {
        for (std::int64_t layer = 0; layer < arena.shape[0]; ++layer) {
            put_block(arena, layer, get_int(ids, i), from);
            from += block_bytes(arena);
        }
    }
}

// A chain over the words of all layers; each layer's last word is filled up with zeros.
void checksum_blocks(const TensorRef& sums, const TensorRef& arena, const TensorRef& ids) {
    check::checksum_blocks(sums, arena, ids);
    constexpr std::uint64_t kStep = 0x9e3779b97f4a7c15U;
    for (std::int64_t i = 0; i < ids.shape[0]; ++i) {
        std::uint64_t sum = kStep;
        for (std::int64_t layer = 0; layer < arena.shape[0]; ++layer) {
            Bytes bytes = block(arena, layer, get_int(ids, i));
            bytes.resize((bytes.size() + 7) / 8 * 8, 0);
            for (std::size_t place = 0; place < bytes.size(); place += 8) {
                std::uint64_t word = 0;
                std::memcpy(&word, bytes.data() + place, 8);
                sum ^= word;
                sum = (sum ^ sum >> 33) * 0xff51afd7ed558ccdU;
                sum = (sum ^ sum >> 29) + kStep;
            }
        }
        std::memcpy(at(sums, i), &sum, 8);
    }
}

}  // namespace octavo::ref
