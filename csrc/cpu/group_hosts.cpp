#include "octavo/group_hosts.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "octavo/api.h"
#include "octavo/check.h"
#include "row_askers.h"

namespace octavo {
namespace {

constexpr std::int64_t kMostSpan = std::int64_t{1} << 30;
constexpr std::int64_t kMostWanted = std::int64_t{1} << 24;  // bytes said of a row, of whatever vocabulary

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

bool GroupHosts::tell(const TeamOrder& order, const TensorRef& hidden, const WantedLogits& wanted) {
    require(speaks() && host() == 0, "hosts", "are not those of the front");
    expect_states(hidden, "hidden");
    const bool logits = order.order() == Order::kLogits;
    require(!logits || hidden.shape[0] >= order.rows(), "hidden", "has too few rows");
    if (logits) {
        wanted_ = wanted;  // first: also where the team breaks now, `collect` is of these
    }
    if (!links_.tell(Frame::kOrder, order.order_data(), order.order_bytes())) {
        return false;
    }
    if (!logits) {
        return true;
    }
    const std::vector<char> bytes = wanted.to_bytes();
    return links_.tell(Frame::kHidden, hidden.data, order.rows() * hidden.shape[1] * size_of(hidden.dtype)) &&
           links_.tell(Frame::kWanted, bytes.data(), static_cast<std::int64_t>(bytes.size()));
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
        if (frame == Frame::kAdapter) {
            if (!take_adapter(bytes)) {
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
        return links_.read(hidden.data, bytes) && take_wanted(order);
    }
    return false;
}

bool GroupHosts::take_wanted(const TeamOrder& order) {
    std::vector<char> said;
    return hear_said(Frame::kWanted, order.rows() * kMostWanted, 0, said) &&
           (wanted_.take_bytes(said) || links_.refuse(0));
}

// A frame of any size up to one.
bool GroupHosts::hear_said(Frame frame, std::int64_t most_bytes, int host, std::vector<char>& said) {
    Frame heard{};
    std::int64_t bytes = 0;
    if (!links_.hear(heard, bytes, host)) {
        return false;
    }
    if (heard != frame || bytes > most_bytes) {
        return links_.refuse(host);
    }
    said.resize(static_cast<std::size_t>(bytes));
    return links_.read(said.data(), bytes, host);
}

// In the front, when what was wanted is there: what follows from that is asked, until all is known.
bool GroupHosts::ask(const Columns& logits) {
    if (!wanted_.asks()) {
        return true;
    }
    const std::unique_ptr<RowAskers> askers = wanted_.askers(logits);
    for (;;) {
        std::vector<char> said = askers->questions();
        if (!links_.tell(Frame::kQuestions, said.data(), static_cast<std::int64_t>(said.size()))) {
            return false;
        }
        if (said.empty()) {
            askers->finish();
            return true;
        }
        askers->answer_here();
        for (int other = 1; other < size(); ++other) {
            if (!hear_said(Frame::kAnswers, logits.rows * kMostWanted, other, said)) {
                return false;
            }
            if (!askers->take(other, said)) {
                return links_.refuse(other);
            }
        }
        askers->go_on();
    }
}

// In other hosts: what the front asks, until it asks nothing more.
bool GroupHosts::answer(const Columns& logits) {
    std::vector<char> said, answers;
    while (wanted_.asks()) {
        if (!hear_said(Frame::kQuestions, logits.rows * kMostWanted, 0, said)) {
            return false;
        }
        if (said.empty()) {
            return true;
        }
        answers.clear();
        if (!wanted_.answer(logits, host(), said, answers)) {
            return links_.refuse(0);
        }
        if (!links_.send(0, Frame::kAnswers, answers.data(), static_cast<std::int64_t>(answers.size()))) {
            return false;
        }
    }
    return true;
}

bool GroupHosts::exchange(std::initializer_list<Columns> columns) { return links_.exchange(columns, peers_); }

bool GroupHosts::collect(const Columns& logits) {
    if (host() > 0) {
        if (!wanted_.fit(logits)) {
            return links_.refuse(0);
        }
        wanted_.pack(logits, host(), links_.begin(0, Frame::kColumns, wanted_.bytes_of(logits, host())));
        return links_.send_begun(0) && answer(logits);
    }
    require(wanted_.fit(logits), "wanted", "are not of these logits");
    std::vector<Parcel> parcels;
    for (int other = 1; other < size(); ++other) {
        wanted_.clear(logits, other);
        parcels.push_back({other, wanted_.bytes_of(logits, other)});
    }
    return links_.receive(Frame::kColumns, parcels) &&
           std::all_of(parcels.begin(), parcels.end(),
                       [&](const Parcel& parcel) {
                           return wanted_.unpack(logits, parcel.host, links_.received(parcel.host)) ||
                                  links_.refuse(parcel.host);
                       }) &&
           ask(logits);
}

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

bool GroupHosts::collect(const TensorRef& logits, const std::vector<Span>& spans) {
    return collect(columns_of(logits, spans));
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
