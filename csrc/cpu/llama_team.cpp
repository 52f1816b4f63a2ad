// What the ranks of a group do for each other: see octavo/team.h.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kv_pages.h"
#include "octavo/llama.h"
#include "octavo/pool.h"
#include "team_room.h"

namespace octavo {

void Llama::serve(const std::vector<KvCache>& kv) {
    require(room_ != nullptr && share_.team->rank() > 0, "share", "is not that of a rank that serves");
    require(kv.size() == layers_.size(), "kv", "has another number of layers");
    std::vector<KvPages> layers;
    for (const KvCache& layer : kv) {
        layers.push_back(kv_pages(layer, sizes_.head_dim));
        require(layers.back().num_heads == sizes_.kv_heads, "kv", "has another number of heads");
    }
    while (share_.team->meet_for_orders()) {
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
        share_.team->meet_in_step();
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
    share_.team->meet_in_step();
}

}  // namespace octavo
