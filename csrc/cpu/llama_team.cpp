// What the ranks of a group do for each other: see octavo/team.h.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kv_pages.h"
#include "octavo/check.h"
#include "octavo/llama.h"
#include "octavo/pool.h"
#include "team_room.h"

namespace octavo {
namespace {

constexpr std::int64_t kMirrored = 16;  // blocks, at once

// What is said of blocks to other hosts: their number, their ids, and their bytes, layer by layer.
TensorRef ids_in(std::vector<char>& said, std::int64_t count) {
    TensorRef ids;
    ids.data = said.data() + 8;
    ids.dtype = DType::kI64;
    ids.ndim = 1;
    ids.shape[0] = count;
    ids.stride[0] = 1;
    return ids;
}

TensorRef staging_in(std::vector<char>& said, std::int64_t layers, std::int64_t row, std::int64_t count) {
    TensorRef staging;
    staging.data = said.data() + 8 + 8 * count;
    staging.dtype = DType::kU8;
    staging.ndim = 3;
    const std::int64_t shape[] = {count, layers, row};
    for (int i = 0; i < 3; ++i) {
        staging.shape[i] = shape[i];
        staging.stride[i] = i == 0 ? layers * row : i == 1 ? row : 1;
    }
    return staging;
}

void check_arena(const TensorRef& arena) {
    usable(arena, "arena");
    require(arena.ndim >= 3 && arena.size() > 0, "arena", "has no blocks");
    std::vector<char> nothing(8);
    check::staged_blocks(staging_in(nothing, arena.shape[0], 1, 0), arena, ids_in(nothing, 0), 0);
}

bool place_mirrored(const TensorRef& arena, std::vector<char>& said) {
    std::int64_t count = 0;
    std::memcpy(&count, said.data(), 8);
    const std::int64_t row = arena.size() * size_of(arena.dtype) / (arena.shape[0] * arena.shape[1]);
    if (count < 1 || count > kMirrored ||
        static_cast<std::int64_t>(said.size()) != 8 + count * (8 + arena.shape[0] * row)) {
        return false;
    }
    try {
        scatter_blocks(arena, staging_in(said, arena.shape[0], row, count), ids_in(said, count), 0);
    } catch (const ArgumentError&) {  // ids of no blocks
        return false;
    }
    return true;
}

}  // namespace

void Llama::serve(const std::vector<KvCache>& kv, const TensorRef& arena) {
    require(room_ != nullptr && (share_.team->rank() > 0 || (speaks() && share_.links->host() > 0)), "share",
            "is not that of a rank that serves");
    require(kv.size() == layers_.size(), "kv", "has another number of layers");
    if (speaks()) {
        check_arena(arena);
    }
    std::vector<KvPages> layers;
    for (const KvCache& layer : kv) {
        layers.push_back(kv_pages(layer, sizes_.head_dim));
        require(layers.back().num_heads == sizes_.kv_heads, "kv", "has another number of heads");
    }
    while ((!speaks() || hear_order(arena)) && share_.team->meet_for_orders()) {
        switch (room_->order()) {
            case Order::kForward:
                run(TensorRef{}, room_->step(), layers);
                break;
            case Order::kLogits:
                share_of_logits(room_->rows());
                break;
        }
    }
}

// To other hosts, before this one meets.
void Llama::tell_order() const {
    if (share_.links != nullptr) {
        share_.links->tell(Frame::kOrder, room_->order_data(), room_->order_bytes());
        if (room_->order() == Order::kLogits) {
            share_.links->tell(Frame::kHidden, room_->hidden, 4 * room_->rows() * sizes_.hidden);
        }
    }
}

// False if the team is broken. Blocks that come before the order are put where they belong.
bool Llama::hear_order(const TensorRef& arena) {
    HostLinks& links = *share_.links;
    Frame frame{};
    std::int64_t bytes = 0;
    std::vector<char> blocks;
    while (links.hear(frame, bytes)) {
        if (frame == Frame::kBlocks) {
            const std::int64_t count = arena.shape[1], all = arena.size() * size_of(arena.dtype);
            const std::int64_t most = std::min(kMirrored, count) * (all / count + 8) + 8;
            if (bytes < 8 || bytes > most) {
                return links.refuse(0);
            }
            blocks.resize(static_cast<std::size_t>(bytes));
            if (!links.read(blocks.data(), bytes)) {
                return false;
            }
            if (!place_mirrored(arena, blocks)) {
                return links.refuse(0);
            }
            continue;
        }
        if (frame != Frame::kOrder || bytes > room_->most_order_bytes()) {
            return links.refuse(0);
        }
        if (!links.read(room_->order_data(), bytes)) {
            return false;
        }
        if (!room_->order_has_room() || bytes != room_->order_bytes()) {
            return links.refuse(0);
        }
        if (room_->order() == Order::kLogits) {
            if (!links.hear(frame, bytes)) {
                return false;
            }
            if (frame != Frame::kHidden || bytes != 4 * room_->rows() * sizes_.hidden) {
                return links.refuse(0);
            }
            return links.read(room_->hidden, bytes);
        }
        return true;
    }
    return false;
}

void Llama::mirror(const TensorRef& arena, const TensorRef& ids) {
    require(share_.links != nullptr && share_.links->host() == 0, "share", "is not that of the front of several hosts");
    expect(ids, "ids", {kAny}, DType::kI64);
    check_arena(arena);
    const std::int64_t row = arena.size() * size_of(arena.dtype) / (arena.shape[0] * arena.shape[1]);
    std::vector<char> blocks;
    for (std::int64_t first = 0; first < ids.shape[0]; first += kMirrored) {
        const std::int64_t count = std::min(kMirrored, ids.shape[0] - first);
        blocks.resize(static_cast<std::size_t>(8 + count * (8 + arena.shape[0] * row)));
        std::memcpy(blocks.data(), &count, 8);
        std::memcpy(blocks.data() + 8, ids.as<std::int64_t>() + first, static_cast<std::size_t>(8 * count));
        gather_blocks(staging_in(blocks, arena.shape[0], row, count), arena, ids_in(blocks, count), 0);
        if (!share_.links->tell(Frame::kBlocks, blocks.data(), static_cast<std::int64_t>(blocks.size()))) {
            throw std::runtime_error(share_.team->trouble());
        }
    }
}

std::int64_t Llama::team_bytes(const LlamaSizes& sizes, std::int64_t tokens, std::int64_t plan_bytes) {
    return Team::kControlBytes + TeamRoom::bytes(sizes, tokens, plan_bytes);
}

void Llama::logits(const TensorRef& out, const TensorRef& hidden) const {
    expect(hidden, "hidden", {kAny, sizes_.hidden}, DType::kF32);
    if (room_ == nullptr) {
        return linear(out, hidden, head_, TensorRef{});
    }
    const std::int64_t count = hidden.shape[0], row = sizes_.hidden * 4;
    expect(out, "out", {count, sizes_.vocab}, DType::kF32);
    expect_apart(out, "out", {&hidden});
    for (std::int64_t first = 0; first < count; first += TeamRoom::kRows) {
        const std::int64_t rows = std::min(TeamRoom::kRows, count - first);
        for (std::int64_t i = 0; i < rows; ++i) {
            std::memcpy(room_->hidden + i * sizes_.hidden, hidden.as<float>() + (first + i) * hidden.stride[0],
                        static_cast<std::size_t>(row));
        }
        room_->order_logits(rows);
        tell_order();
        share_.team->meet_all();
        share_of_logits(rows);
        if (share_.team->broken()) {
            throw std::runtime_error(share_.team->trouble());
        }
        Pool::instance().run([&](PoolThread& thread) {
            thread.each(rows, [&](std::int64_t i) {
                std::memcpy(out.as<float>() + (first + i) * out.stride[0], room_->logits + i * sizes_.vocab,
                            static_cast<std::size_t>(sizes_.vocab) * 4);
            });
        });
    }
}

// The columns of this rank's tokens, and then those of all are there.
void Llama::share_of_logits(std::int64_t rows) const {
    const auto floats = [rows](float* data, std::int64_t columns, std::int64_t stride) {
        TensorRef tensor;
        tensor.data = data;
        tensor.ndim = 2;
        tensor.shape[0] = rows;
        tensor.shape[1] = columns;
        tensor.stride[0] = stride;
        tensor.stride[1] = 1;
        return tensor;
    };
    linear(floats(room_->logits + share_.vocab.first, share_.vocab.count, sizes_.vocab),
           floats(room_->hidden, sizes_.hidden, sizes_.hidden), head_, TensorRef{});
    share_.team->meet_all();
    if (speaks()) {
        share_.links->collect({room_->logits, rows, sizes_.vocab, &share_.host_vocab});
    }
}

}  // namespace octavo
