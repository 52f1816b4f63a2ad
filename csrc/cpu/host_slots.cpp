// What hosts of a group do at the end of a step (see octavo/group_hosts.h): they send on the states of the stages
// there, and the front gets what it wants, and what others have written into blocks.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "kv_pages.h"
#include "octavo/group_hosts.h"

namespace octavo {
namespace {

constexpr std::int64_t kSlotBytes = std::int64_t{4} << 20;  // of a frame, as far as a layer is not longer

// Where the keys and values of some heads lie in a slot: body(place, bytes), piece by piece.
template <typename Body>
void each_piece(const KvPages& pages, const Span& heads, std::int64_t slot, Body&& body) {
    const std::int64_t size = size_of(pages.dtype), block = slot / pages.block_size, at = slot % pages.block_size;
    for (std::int64_t head = heads.first; head < heads.first + heads.count; ++head) {
        for (const KvSide* side : {&pages.keys, &pages.values}) {
            char* place = side->data + (block * side->block + head * side->head + at * side->slot) * size;
            for (std::int64_t i = 0; i < pages.head_dim; i += side->run, place += side->outer * size) {
                body(place, side->run * size);
            }
            if (side->slot_scales != nullptr) {
                body(side->slot_scales + block * side->slot_scale_block + head * side->slot_scale_head + 2 * at, 2);
            }
        }
    }
}

std::int64_t slot_bytes(const KvPages& pages, std::int64_t heads) {
    const std::int64_t scale = pages.keys.slot_scales != nullptr ? 2 : 0;
    return heads * 2 * (pages.head_dim * size_of(pages.dtype) + scale);
}

// The slots that a step writes, and of how many layers at once they are sent.
struct Written {
    Written(const TeamStep& step, const std::vector<KvPages>& kv) {
        const auto* all = step.slots.as<std::int64_t>();
        std::copy_if(all, all + step.slots.shape[0], std::back_inserter(slots), [](auto slot) { return slot >= 0; });
        const auto layers = static_cast<std::int64_t>(slots.empty() ? 0 : kv.size());
        if (layers > 0) {
            layer_bytes = static_cast<std::int64_t>(slots.size()) * slot_bytes(kv[0], 1);
            at_once = std::clamp<std::int64_t>(kSlotBytes / (layer_bytes * kv[0].num_heads), 1, layers);
        }
    }

    // Of a host's layers: those that it sends after `first` of them were sent.
    Span part(const Span& layers, std::int64_t first) const {
        return {layers.first + first, std::clamp<std::int64_t>(layers.count - first, 0, at_once)};
    }

    template <typename Body>
    void each(const std::vector<KvPages>& kv, const Span& layers, const Span& heads, const Body& body) const {
        for (std::int64_t layer = layers.first; layer < layers.first + layers.count; ++layer) {
            for (const std::int64_t slot : slots) {
                each_piece(kv[static_cast<std::size_t>(layer)], heads, slot, body);
            }
        }
    }

    std::vector<std::int64_t> slots;
    std::int64_t layer_bytes = 0;  // of one head
    std::int64_t at_once = 0;
};

TensorRef rows_of(const TensorRef& states, std::int64_t first, std::int64_t count) {
    TensorRef rows = states;
    rows.data = states.as<char>() + first * states.stride[0] * size_of(states.dtype);
    rows.shape[0] = count;
    return rows;
}

char* row_at(const TensorRef& states, const TensorRef& rows, std::int64_t i) {
    return states.as<char>() + rows.as<std::int64_t>()[i] * states.stride[0] * size_of(states.dtype);
}

std::int64_t row_bytes(const TensorRef& states) { return states.shape[1] * size_of(states.dtype); }

}  // namespace

bool GroupHosts::end_step(const TeamOrder& order, std::int64_t parts, const std::vector<KvCache>& kv,
                          const TensorRef& states) {
    require(speaks(), "hosts", "are not those of a first rank");
    require(order.order() == Order::kForward, "order", "is not that of a step");
    const TeamStep step = order.step();
    const std::int64_t count = step.token_ids.shape[0];
    require(parts >= 0 && parts <= count, "parts", "are not those of a step");
    expect(states, "states", {count, kAny});
    require(states.is_float(), "states", "hold no floats");
    expect_dense(states, "states");
    require(static_cast<std::int64_t>(kv.size()) == layers_.back().first + layers_.back().count, "kv",
            "has another number of layers");
    std::vector<KvPages> pages;
    for (const KvCache& layer : kv) {
        pages.push_back(kv_pages(layer, KvNames("kv")));
        const KvPages &one = pages.front(), &last = pages.back();
        require(last.num_blocks == one.num_blocks && last.block_size == one.block_size &&
                    last.num_heads == one.num_heads && last.head_dim == one.head_dim && last.dtype == one.dtype,
                "kv", "has layers of different forms");
        require(std::all_of(kv_heads_.begin(), kv_heads_.end(),
                            [&](const Span& heads) { return heads.within(last.num_heads); }),
                "kv", "has another number of heads");
    }
    if (!pages.empty()) {
        check_slots(step.slots, "order", count, pages.front());
    }
    for (std::int64_t i = 0; i < step.rows.shape[0]; ++i) {
        const std::int64_t row = step.rows.as<std::int64_t>()[i];
        require(row >= 0 && row < count, "order", "wants rows that are no tokens");
    }
    return end_step(step, parts, pages, states);
}

bool GroupHosts::end_step(const TeamStep& step, std::int64_t parts, const std::vector<KvPages>& kv,
                          const TensorRef& states) {
    const std::int64_t n = step.token_ids.shape[0];
    for (std::int64_t i = 0; i < parts && team_.stages() > 1; ++i) {
        const std::int64_t first = i * n / parts, end = (i + 1) * n / parts;
        if (!team_.wait_for_end(static_cast<std::uint32_t>(parts - 1 - i)) ||
            (after() >= 0 && !send_states(rows_of(states, first, end - first)))) {
            return false;
        }
    }
    return host() == 0 ? hear_end(step, kv, states) : tell_end(step, kv, states);
}

// To the front: the states that it wants, and what this host has written into its blocks.
bool GroupHosts::tell_end(const TeamStep& step, const std::vector<KvPages>& kv, const TensorRef& states) {
    const auto here = static_cast<std::size_t>(host());
    std::vector<char> bytes;
    const auto append = [&bytes](const void* from, std::int64_t count) {
        const char* begin = static_cast<const char*>(from);
        bytes.insert(bytes.end(), begin, begin + count);
    };
    if (after() < 0 && host() == peers_.first) {
        for (std::int64_t i = 0; i < step.rows.shape[0]; ++i) {
            append(row_at(states, step.rows, i), row_bytes(states));
        }
        if (!links_.send(0, Frame::kStates, bytes.data(), static_cast<std::int64_t>(bytes.size()))) {
            return false;
        }
    }
    const Written written(step, kv);
    for (std::int64_t first = 0; !written.slots.empty() && first < layers_[here].count; first += written.at_once) {
        bytes.clear();
        written.each(kv, written.part(layers_[here], first), kv_heads_[here], append);
        if (!links_.send(0, Frame::kSlots, bytes.data(), static_cast<std::int64_t>(bytes.size()))) {
            return false;
        }
    }
    return true;
}

// In the front: so that it samples, and swaps, copies and sends whole blocks.
bool GroupHosts::hear_end(const TeamStep& step, const std::vector<KvPages>& kv, const TensorRef& states) {
    if (after() >= 0) {
        const int last = size() - static_cast<int>(peers_.count);
        const std::int64_t row = row_bytes(states), rows = step.rows.shape[0];
        if (!links_.receive(Frame::kStates, {{last, rows * row}})) {
            return false;
        }
        for (std::int64_t i = 0; i < rows; ++i) {
            std::memcpy(row_at(states, step.rows, i), links_.received(last) + i * row, static_cast<std::size_t>(row));
        }
    }
    const Written written(step, kv);
    for (std::int64_t first = 0; !written.slots.empty(); first += written.at_once) {
        std::vector<Parcel> parcels;
        for (int other = 1; other < size(); ++other) {
            const auto at = static_cast<std::size_t>(other);
            const std::int64_t layers = written.part(layers_[at], first).count;
            if (layers > 0) {
                parcels.push_back({other, layers * written.layer_bytes * kv_heads_[at].count});
            }
        }
        if (parcels.empty()) {
            break;
        }
        if (!links_.receive(Frame::kSlots, parcels)) {
            return false;
        }
        for (const Parcel& parcel : parcels) {
            const auto at = static_cast<std::size_t>(parcel.host);
            const char* from = links_.received(parcel.host);
            const auto place = [&from](char* to, std::int64_t count) {
                std::memcpy(to, from, static_cast<std::size_t>(count));
                from += count;
            };
            written.each(kv, written.part(layers_[at], first), kv_heads_[at], place);
        }
    }
    return true;
}

}  // namespace octavo
