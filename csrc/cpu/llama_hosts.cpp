// How the stages of a group go on from host to host, and what the front gets at the end of a step: see
// octavo/host_links.h.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "kv_pages.h"
#include "octavo/llama.h"
#include "team_room.h"

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
    Written(const LlamaStep& step, const std::vector<KvPages>& kv) {
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

}  // namespace

bool Llama::is_staged() const {
    return share_.team != nullptr &&
           (share_.team->stages() > 1 || (share_.links != nullptr && peers_.count < share_.links->size()));
}

// Who has the layers before those of this host; -1: nobody.
int Llama::host_before() const {
    return share_.links == nullptr || peers_.first == 0 ? -1 : share_.links->host() - static_cast<int>(peers_.count);
}

// Who has those after them; -1: nobody.
int Llama::host_after() const {
    return share_.links == nullptr || peers_.first + peers_.count == share_.links->size()
               ? -1
               : share_.links->host() + static_cast<int>(peers_.count);
}

// All three: false if the team is broken.
bool Llama::send_states(int host, std::int64_t first, std::int64_t count) const {
    return share_.links->send(host, Frame::kStates, room_->x + first * sizes_.hidden, 4 * count * sizes_.hidden);
}

bool Llama::receive_states(std::int64_t first, std::int64_t count) const {
    const int host = host_before();
    const std::int64_t bytes = 4 * count * sizes_.hidden;
    if (!share_.links->receive(Frame::kStates, {{host, bytes}})) {
        return false;
    }
    std::memcpy(room_->x + first * sizes_.hidden, share_.links->received(host), static_cast<std::size_t>(bytes));
    return true;
}

// In the first rank of a host, after its parts of a step.
bool Llama::end_step(const LlamaStep& step, std::int64_t parts, const std::vector<KvPages>& kv) const {
    const std::int64_t n = step.token_ids.shape[0];
    for (std::int64_t i = 0; i < parts && share_.team->stages() > 1; ++i) {
        const std::int64_t first = i * n / parts, end = (i + 1) * n / parts;
        if (!share_.team->wait_for_end(static_cast<std::uint32_t>(parts - 1 - i)) ||
            (host_after() >= 0 && !send_states(host_after(), first, end - first))) {
            return false;
        }
    }
    return share_.links->host() == 0 ? hear_end(step, kv) : tell_end(step, kv);
}

// To the front: the states that it wants, and what this host has written into its blocks.
bool Llama::tell_end(const LlamaStep& step, const std::vector<KvPages>& kv) const {
    HostLinks& links = *share_.links;
    const auto host = static_cast<std::size_t>(links.host());
    std::vector<char> bytes;
    const auto append = [&bytes](const void* from, std::int64_t count) {
        const char* begin = static_cast<const char*>(from);
        bytes.insert(bytes.end(), begin, begin + count);
    };
    if (host_after() < 0 && links.host() == peers_.first) {
        for (std::int64_t i = 0; i < step.rows.shape[0]; ++i) {
            append(room_->x + step.rows.as<std::int64_t>()[i] * sizes_.hidden, 4 * sizes_.hidden);
        }
        if (!links.send(0, Frame::kStates, bytes.data(), static_cast<std::int64_t>(bytes.size()))) {
            return false;
        }
    }
    const Written written(step, kv);
    for (std::int64_t first = 0; !written.slots.empty() && first < share_.host_layers[host].count;
         first += written.at_once) {
        bytes.clear();
        written.each(kv, written.part(share_.host_layers[host], first), share_.host_kv_heads[host], append);
        if (!links.send(0, Frame::kSlots, bytes.data(), static_cast<std::int64_t>(bytes.size()))) {
            return false;
        }
    }
    return true;
}

// In the front: so that it samples, and swaps, copies and sends whole blocks.
bool Llama::hear_end(const LlamaStep& step, const std::vector<KvPages>& kv) const {
    HostLinks& links = *share_.links;
    if (host_after() >= 0) {
        const int last = links.size() - static_cast<int>(peers_.count);
        const std::int64_t row = 4 * sizes_.hidden, rows = step.rows.shape[0];
        if (!links.receive(Frame::kStates, {{last, rows * row}})) {
            return false;
        }
        for (std::int64_t i = 0; i < rows; ++i) {
            std::memcpy(room_->x + step.rows.as<std::int64_t>()[i] * sizes_.hidden, links.received(last) + i * row,
                        static_cast<std::size_t>(row));
        }
    }
    const Written written(step, kv);
    for (std::int64_t first = 0; !written.slots.empty(); first += written.at_once) {
        std::vector<Parcel> parcels;
        for (int host = 1; host < links.size(); ++host) {
            const auto at = static_cast<std::size_t>(host);
            const std::int64_t layers = written.part(share_.host_layers[at], first).count;
            if (layers > 0) {
                parcels.push_back({host, layers * written.layer_bytes * share_.host_kv_heads[at].count});
            }
        }
        if (parcels.empty()) {
            break;
        }
        if (!links.receive(Frame::kSlots, parcels)) {
            return false;
        }
        for (const Parcel& parcel : parcels) {
            const auto host = static_cast<std::size_t>(parcel.host);
            const char* from = links.received(parcel.host);
            const auto place = [&from](char* to, std::int64_t count) {
                std::memcpy(to, from, static_cast<std::size_t>(count));
                from += count;
            };
            written.each(kv, written.part(share_.host_layers[host], first), share_.host_kv_heads[host], place);
        }
    }
    return true;
}

}  // namespace octavo
