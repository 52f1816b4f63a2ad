#include "octavo/lora_room.h"

#include <sys/mman.h>

#include <algorithm>
#include <type_traits>
#include <utility>

#include "lora.h"

namespace octavo {
namespace {

constexpr std::size_t kMostFound = 256;
constexpr std::size_t kMostParts = 4;
constexpr LoraStackOf kStacks[] = {&LoraLayer::qkv, &LoraLayer::out, &LoraLayer::gate_up, &LoraLayer::down};

// As processes see it that map the memory at other places: `data` is an offset.
struct StackTable {
    Weight a;
    std::int64_t num_parts;
    LoraPart parts[kMostParts];
};
static_assert(std::is_trivially_copyable_v<StackTable>);

// Those rows of a stack. The first of them becomes row `start`.
LoraStack cut(const LoraStack& whole, const std::vector<Span>& rows, std::int64_t start) {
    LoraStack own{whole.a, {}};
    for (const Span& span : rows) {
        for (const LoraPart& part : whole.parts) {
            const std::int64_t first = std::max(span.first, part.first);
            const std::int64_t end = std::min(span.first + span.count, part.first + part.b.cols);
            if (first < end) {
                LoraPart some = part;
                some.skipped += first - part.first;
                some.b.cols = end - first;
                some.first = start + first - span.first;
                own.parts.push_back(some);
            }
        }
        start += span.count;
    }
    return own;
}

}  // namespace

struct LoraRoom::Table {
    std::int64_t number, layers;
    double scale;

    StackTable* stacks() { return reinterpret_cast<StackTable*>(this + 1); }
};

LoraRoom::LoraRoom(const TensorRef& memory) : memory_(memory) { expect(memory, "memory", {kAny}, DType::kU8); }

std::int64_t LoraRoom::table_bytes(std::int64_t layers) {
    require(layers >= 0 && layers < kMostElements, "layers", "are no number of layers");
    return static_cast<std::int64_t>(sizeof(Table)) +
           layers * static_cast<std::int64_t>(std::size(kStacks) * sizeof(StackTable));
}

void LoraRoom::put(Lora& lora, std::int64_t place) {
    const auto layers = static_cast<std::int64_t>(lora.layers.size());
    require(place > 0 && place % 64 == 0 && table_bytes(layers) <= bytes() - place, "place", "has no room for a table");
    std::int64_t end = place + table_bytes(layers);
    const auto offset = [&](Weight weight) {
        const auto* data = static_cast<const char*>(weight.data);
        const std::int64_t size = weight.rows * weight.stride * plain_bytes(weight.format);
        require(data >= at(place) && size <= bytes() - (data - at(0)), "lora", "lies in other memory");
        end = std::max(end, data - at(0) + size);
        weight.data = reinterpret_cast<const void*>(data - at(0));
        return weight;
    };
    auto* table = reinterpret_cast<Table*>(at(place));
    StackTable* to = table->stacks();
    for (const LoraLayer& layer : lora.layers) {
        for (const LoraStackOf stack : kStacks) {
            const auto& [a, parts] = layer.*stack;
            require(parts.size() <= kMostParts, "lora", "has more parts than a stack may have");
            *to = {parts.empty() ? Weight{} : offset(a), static_cast<std::int64_t>(parts.size()), {}};
            for (std::size_t i = 0; i < parts.size(); ++i) {
                to->parts[i] = {offset(parts[i].b), parts[i].first, parts[i].low, parts[i].skipped};
            }
            ++to;
        }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    *table = {++last_, layers, lora.scale};
    lora.number = last_;
    lora.place = place;
    new_.push_back({place, end - place});
}

void LoraRoom::drop(const Span& piece) {
    require(piece.within(bytes()), "bytes", "are not those of adapters");
    const std::lock_guard<std::mutex> lock(mutex_);
    new_.erase(std::remove_if(new_.begin(), new_.end(), [&](const Span& each) { return each.first == piece.first; }),
               new_.end());
    constexpr std::intptr_t kPage = 4096;
    const auto first = (reinterpret_cast<std::intptr_t>(at(piece.first)) + kPage - 1) / kPage * kPage;
    const auto end = reinterpret_cast<std::intptr_t>(at(piece.first + piece.count)) / kPage * kPage;
    if (first < end) {  // where that cannot be done, as in memory of one process, it stays
        madvise(reinterpret_cast<void*>(first), static_cast<std::size_t>(end - first), MADV_REMOVE);
    }
}

std::vector<Span> LoraRoom::take_new() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(new_, {});
}

Lora LoraRoom::read(std::int64_t number, std::int64_t place) const {
    require(place > 0 && place % 64 == 0 && place <= bytes() - table_bytes(0), "loras", "have another place");
    const auto* table = reinterpret_cast<const Table*>(at(place));
    require(table->number == number && table->layers >= 0 && table->layers <= (bytes() - place) / table_bytes(1),
            "loras", "are not where they were put");
    const auto here = [&](Weight weight) {
        const auto offset = reinterpret_cast<std::intptr_t>(weight.data);
        const bool plain = weight.format <= Format::kBF16 && weight.rows >= 0 && weight.cols >= 0 &&
                           weight.stride >= weight.cols && weight.stride < kMostElements;
        require(plain && offset >= 0 && offset <= bytes() &&
                    volume({weight.rows, weight.stride, plain_bytes(weight.format)}) <= bytes() - offset,
                "loras", "lie in other memory");
        weight.data = at(offset);
        return weight;
    };
    Lora lora{static_cast<float>(table->scale), std::vector<LoraLayer>(static_cast<std::size_t>(table->layers)), number,
              place};
    const auto* from = reinterpret_cast<const StackTable*>(table + 1);
    for (LoraLayer& layer : lora.layers) {
        for (const LoraStackOf stack : kStacks) {
            LoraStack& to = layer.*stack;
            to.a = here(from->a);
            require(from->num_parts >= 0 && from->num_parts <= static_cast<std::int64_t>(kMostParts), "loras",
                    "have more parts than a stack may have");
            for (std::int64_t i = 0; i < from->num_parts; ++i) {
                const LoraPart& part = from->parts[i];
                to.parts.push_back({here(part.b), part.first, part.low, part.skipped});
            }
            ++from;
        }
    }
    return lora;
}

const Lora& LoraRoom::find(std::int64_t number, std::int64_t place, const OwnRows& own,
                           const std::function<void(const Lora&)>& check) {
    const auto known = found_.find(number);
    if (known != found_.end()) {
        return known->second;
    }
    Lora lora = read(number, place);
    check(lora);
    for (LoraLayer& layer : lora.layers) {
        layer.qkv = cut(layer.qkv, own.qkv, 0);
        layer.gate_up = cut(layer.gate_up, own.gate_up, 0);
        layer.out = cut(layer.out, {own.hidden}, own.hidden.first);
        layer.down = cut(layer.down, {own.hidden}, own.hidden.first);
    }
    return found_.emplace(number, std::move(lora)).first->second;
}

void LoraRoom::forget() {
    if (found_.size() > kMostFound) {
        found_.clear();
    }
}

}  // namespace octavo
