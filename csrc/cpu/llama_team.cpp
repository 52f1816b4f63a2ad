// What the ranks of a group do for each other: see octavo/team.h.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kv_pages.h"
#include "lora.h"
#include "octavo/llama.h"
#include "octavo/lora_room.h"
#include "octavo/pool.h"
#include "team_room.h"

namespace octavo {

void Llama::serve(const std::vector<KvCache>& kv, const TensorRef& arena) {
    require(room_ != nullptr && (share_.team->rank() > 0 || (speaks() && share_.hosts->host() > 0)), "share",
            "is not that of a rank that serves");
    require(kv.size() == layers_.size(), "kv", "has another number of layers");
    if (speaks()) {
        share_.hosts->check_arena(arena);
    }
    std::vector<KvPages> layers;
    for (const KvCache& layer : kv) {
        layers.push_back(kv_pages(layer, sizes_.head_dim));
        require(layers.back().num_heads == sizes_.kv_heads, "kv", "has another number of heads");
    }
    const TensorRef hidden = floats(room_->hidden, TeamRoom::kRows, sizes_.hidden, sizes_.hidden);
    while ((!speaks() || share_.hosts->hear(*room_, hidden, arena)) && share_.team->meet_for_orders()) {
        switch (room_->order()) {
            case Order::kForward:
                run(TensorRef{}, own_step({room_->step(), {}, {}}, room_->step().lora_groups), layers);
                break;
            case Order::kLogits:
                share_of_logits(room_->rows());
                if (speaks()) {
                    share_.hosts->collect(Columns{room_->logits, room_->rows(), sizes_.vocab, &share_.host_vocab});
                }
                break;
        }
    }
}

void Llama::order_forward(const LlamaStep& step) const {
    std::vector<std::int64_t> named;
    for (const auto& [lora, count] : step.loras) {
        require(share_.loras != nullptr && lora->number > 0, "loras", "are not in memory of the group");
        named.insert(named.end(), {lora->number, lora->place, count});
    }
    TeamStep order = step;
    order.lora_groups = TensorRef{};
    if (!named.empty()) {
        order.lora_groups.data = named.data();
        order.lora_groups.dtype = DType::kI64;
        order.lora_groups.ndim = 2;
        order.lora_groups.shape[0] = static_cast<std::int64_t>(step.loras.size());
        order.lora_groups.shape[1] = order.lora_groups.stride[0] = 3;
        order.lora_groups.stride[1] = 1;
    }
    room_->order_forward(order);
    for (const Span& bytes : share_.loras == nullptr ? std::vector<Span>{} : share_.loras->take_new()) {
        if (share_.hosts != nullptr) {
            share_.hosts->tell_adapters(bytes);  // if the team is broken by now, so it is after the step
        }
    }
}

// The step with this rank's rows of the adapters that an order names.
LlamaStep Llama::own_step(LlamaStep step, const TensorRef& lora_groups) const {
    step.loras.clear();
    if (share_.loras == nullptr) {
        return step;
    }
    const std::int64_t d = sizes_.head_dim;
    const auto rows = [d](std::int64_t start, const Span& heads) {
        return Span{(start + heads.first) * d, heads.count * d};
    };
    const Span& inner = share_.inner;
    const LoraRoom::OwnRows own{
        {rows(0, queries()), rows(sizes_.heads, keys()), rows(sizes_.heads + sizes_.kv_heads, values())},
        {inner, {sizes_.inner + inner.first, inner.count}},
        share_.hidden};
    share_.loras->forget();
    for (std::int64_t i = 0; i < lora_groups.shape[0]; ++i) {
        const auto* named = lora_groups.as<std::int64_t>() + i * 3;
        const Lora& lora = share_.loras->find(named[0], named[1], own, [this](const Lora& all) { check_lora(all); });
        step.loras.push_back({&lora, named[2]});
    }
    check_lora_rows(step, step.token_ids.shape[0]);
    return step;
}

// To other hosts, before this one meets.
void Llama::tell_order(const WantedLogits& wanted) const {
    if (share_.hosts != nullptr) {
        share_.hosts->tell(*room_, floats(room_->hidden, TeamRoom::kRows, sizes_.hidden, sizes_.hidden), wanted);
    }
}

bool Llama::is_staged() const {
    return share_.team != nullptr &&
           (share_.team->stages() > 1 || (share_.hosts != nullptr && share_.hosts->divides_layers()));
}

TensorRef Llama::states(std::int64_t first, std::int64_t count) const {
    return floats(room_->x + first * sizes_.hidden, count, sizes_.hidden, sizes_.hidden);
}

std::int64_t Llama::team_bytes(const LlamaSizes& sizes, std::int64_t tokens, std::int64_t plan_bytes) {
    return Team::kControlBytes + TeamRoom::bytes(sizes, tokens, plan_bytes);
}

void Llama::logits(const TensorRef& out, const TensorRef& hidden, const WantedLogits& wanted) const {
    expect(hidden, "hidden", {kAny, sizes_.hidden}, DType::kF32);
    if (room_ == nullptr) {
        return linear_logits(out, hidden);
    }
    const std::int64_t count = hidden.shape[0], row = sizes_.hidden * 4;
    expect(out, "out", {count, sizes_.vocab}, DType::kF32);
    expect_apart(out, "out", {&hidden});
    const Span here = share_.hosts != nullptr ? share_.host_vocab.front() : Span{0, sizes_.vocab};
    const auto rows_of = [&](std::int64_t first, std::int64_t rows) {
        return Columns{out.as<float>() + first * out.stride[0], rows, out.stride[0], &share_.host_vocab};
    };
    require(share_.hosts == nullptr || wanted.fit(rows_of(0, count)), "wanted", "are not of these logits");
    for (std::int64_t first = 0; first < count; first += TeamRoom::kRows) {
        const std::int64_t rows = std::min(TeamRoom::kRows, count - first);
        for (std::int64_t i = 0; i < rows; ++i) {
            std::memcpy(room_->hidden + i * sizes_.hidden, hidden.as<float>() + (first + i) * hidden.stride[0],
                        static_cast<std::size_t>(row));
        }
        room_->order_logits(rows);
        tell_order(wanted.rows(first, rows));
        share_.team->meet_all();
        share_of_logits(rows);
        const bool there = out.data == room_->logits && out.stride[0] == sizes_.vocab && count <= TeamRoom::kRows;
        Pool::instance().run([&](PoolThread& thread) {
            thread.each(there ? 0 : rows, [&](std::int64_t i) {
                std::memcpy(out.as<float>() + (first + i) * out.stride[0] + here.first,
                            room_->logits + i * sizes_.vocab + here.first, static_cast<std::size_t>(here.count) * 4);
            });
        });
        if (share_.hosts != nullptr) {
            share_.hosts->collect(rows_of(first, rows));
        }
        if (share_.team->broken()) {
            throw std::runtime_error(share_.team->trouble());
        }
    }
}

TensorRef Llama::shared_logits() const {
    return room_ == nullptr ? TensorRef{} : floats(room_->logits, TeamRoom::kRows, sizes_.vocab, sizes_.vocab);
}

// The columns of this rank's tokens, and then those of all ranks of the host are there.
void Llama::share_of_logits(std::int64_t rows) const {
    linear_logits(floats(room_->logits + share_.vocab.first, rows, share_.vocab.count, sizes_.vocab),
                  floats(room_->hidden, rows, sizes_.hidden, sizes_.hidden));
    share_.team->meet_all();
}

}  // namespace octavo
