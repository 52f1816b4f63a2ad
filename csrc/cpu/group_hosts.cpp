#include "octavo/group_hosts.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "octavo/api.h"
#include "octavo/check.h"

namespace octavo {
namespace {

constexpr std::int64_t kMostSpan = std::int64_t{1} << 30;
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

std::int64_t bytes_of(const TensorRef& states) { return states.size() * size_of(states.dtype); }

void expect_states(const TensorRef& states, const char* name) {
    expect(states, name, {kAny, kAny});
    require(states.is_float(), name, "holds no floats");
    expect_dense(states, name);
}

}  // namespace

GroupHosts::GroupHosts(Team& team, std::vector<int> fds, int host, std::vector<Span> kv_heads, std::vector<Span> layers)
    : team_(team), links_(team, std::move(fds), host), kv_heads_(std::move(kv_heads)), layers_(std::move(layers)) {
    for (const auto& [spans, name] : {std::pair{&kv_heads_, "kv_heads"}, std::pair{&layers_, "layers"}}) {
        require(spans->size() == static_cast<std::size_t>(size()), name, "has no span for each host");
        for (const Span& span : *spans) {
            require(span.within(kMostSpan), name, "has a span of nothing");
        }
    }
    check_layers();
    const Span& here = layers_[static_cast<std::size_t>(host)];
    peers_ = {std::find(layers_.begin(), layers_.end(), here) - layers_.begin(),
              std::count(layers_.begin(), layers_.end(), here)};
}

// Each stage has equally many hosts, or each host equally many stages, one after the other.
void GroupHosts::check_layers() const {
    const auto of_stage = static_cast<std::size_t>(std::count(layers_.begin(), layers_.end(), layers_.front()));
    std::int64_t end = 0;
    for (std::size_t at = 0; at < layers_.size(); ++at) {
        require(at % of_stage == 0 ? layers_[at].first == end : layers_[at] == layers_[at - 1], "layers",
                "has hosts whose layers do not follow each other");
        end = layers_[at].first + layers_[at].count;
    }
    require(layers_.size() % of_stage == 0, "layers", "has hosts whose layers do not follow each other");
}

int GroupHosts::before() const { return peers_.first == 0 ? -1 : host() - static_cast<int>(peers_.count); }

int GroupHosts::after() const {
    return peers_.first + peers_.count == size() ? -1 : host() + static_cast<int>(peers_.count);
}

bool GroupHosts::tell(const TeamOrder& order, const TensorRef& hidden) {
    require(speaks() && host() == 0, "hosts", "are not those of the front");
    expect_states(hidden, "hidden");
    const bool logits = order.order() == Order::kLogits;
    require(!logits || hidden.shape[0] >= order.rows(), "hidden", "has too few rows");
    if (!links_.tell(Frame::kOrder, order.order_data(), order.order_bytes())) {
        return false;
    }
    return !logits || links_.tell(Frame::kHidden, hidden.data, order.rows() * hidden.shape[1] * size_of(hidden.dtype));
}

bool GroupHosts::hear(TeamOrder& order, const TensorRef& hidden, const TensorRef& arena) {
    require(speaks() && host() > 0, "hosts", "are not those of one that hears the front");
    expect_states(hidden, "hidden");
    check_arena(arena);
    Frame frame{};
    std::int64_t bytes = 0;
    while (links_.hear(frame, bytes)) {
        if (frame == Frame::kBlocks) {
            if (!take_blocks(arena, bytes)) {
                return false;
            }
            continue;
        }
        if (frame != Frame::kOrder || bytes > order.most_order_bytes()) {
            return links_.refuse(0);
        }
        if (!links_.read(order.order_data(), bytes)) {
            return false;
        }
        if (!order.order_has_room() || bytes != order.order_bytes()) {
            return links_.refuse(0);
        }
        if (order.order() != Order::kLogits) {
            return true;
        }
        const std::int64_t rows = order.rows() * hidden.shape[1] * size_of(hidden.dtype);
        if (!links_.hear(frame, bytes)) {
            return false;
        }
        if (frame != Frame::kHidden || bytes != rows || order.rows() > hidden.shape[0]) {
            return links_.refuse(0);
        }
        return links_.read(hidden.data, bytes);
    }
    return false;
}

// Puts blocks where they belong.
bool GroupHosts::take_blocks(const TensorRef& arena, std::int64_t bytes) {
    const std::int64_t count = arena.shape[1], all = arena.size() * size_of(arena.dtype);
    if (bytes < 8 || bytes > std::min(kMirrored, count) * (all / count + 8) + 8) {
        return links_.refuse(0);
    }
    std::vector<char> blocks(static_cast<std::size_t>(bytes));
    return links_.read(blocks.data(), bytes) && (place_mirrored(arena, blocks) || links_.refuse(0));
}

void GroupHosts::check_arena(const TensorRef& arena) {
    usable(arena, "arena");
    require(arena.ndim >= 3 && arena.size() > 0, "arena", "has no blocks");
    std::vector<char> nothing(8);
    check::staged_blocks(staging_in(nothing, arena.shape[0], 1, 0), arena, ids_in(nothing, 0), 0);
}

void GroupHosts::mirror(const TensorRef& arena, const TensorRef& ids) {
    require(speaks() && host() == 0, "hosts", "are not those of the front");
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
        if (!links_.tell(Frame::kBlocks, blocks.data(), static_cast<std::int64_t>(blocks.size()))) {
            throw std::runtime_error(team_.trouble());
        }
    }
}

bool GroupHosts::exchange(std::initializer_list<Columns> columns) { return links_.exchange(columns, peers_); }

Columns GroupHosts::columns_of(const TensorRef& columns, const std::vector<Span>& spans) const {
    require(speaks(), "hosts", "are not those of a first rank");
    expect(columns, "columns", {kAny, kAny});
    require(columns.is_float(), "columns", "hold no floats");
    expect_apart(columns, "columns", {});
    require(
        spans.size() == static_cast<std::size_t>(size()) &&
            std::all_of(spans.begin(), spans.end(), [&](const Span& span) { return span.within(columns.shape[1]); }),
        "spans", "are not one of these columns for each host");
    return {columns.data, columns.shape[0], columns.stride[0], &spans, size_of(columns.dtype)};
}

bool GroupHosts::exchange(const TensorRef& columns, const std::vector<Span>& spans) {
    return exchange({columns_of(columns, spans)});
}

bool GroupHosts::collect(const TensorRef& columns, const std::vector<Span>& spans) {
    return collect(columns_of(columns, spans));
}

bool GroupHosts::send_states(const TensorRef& states) {
    require(speaks() && after() >= 0, "hosts", "have none after this one");
    expect_states(states, "states");
    return links_.send(after(), Frame::kStates, states.data, bytes_of(states));
}

bool GroupHosts::receive_states(const TensorRef& states) {
    require(speaks() && before() >= 0, "hosts", "have none before this one");
    expect_states(states, "states");
    const std::int64_t bytes = bytes_of(states);
    if (!links_.receive(Frame::kStates, {{before(), bytes}})) {
        return false;
    }
    std::memcpy(states.data, links_.received(before()), static_cast<std::size_t>(bytes));
    return true;
}

}  // namespace octavo
