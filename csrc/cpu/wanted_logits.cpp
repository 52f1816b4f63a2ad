#include "octavo/wanted_logits.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "kernels.h"
#include "octavo/pool.h"
#include "octavo/sample.h"

namespace octavo {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr std::int64_t kBits = 32;  // of a word of a mask

constexpr std::int32_t kNobody = -1;

struct Entry {
    float logit = kNever;
    std::int32_t id = kNobody;
};

const Span& span_of(const Columns& logits, int host) { return (*logits.spans)[static_cast<std::size_t>(host)]; }

bool has(const Span& span, std::int64_t id) { return id >= span.first && id < span.first + span.count; }

}  // namespace

WantedLogits::WantedLogits(const TensorRef& counts, const TensorRef& ends, const TensorRef& ids,
                           const TensorRef& mask_of, const TensorRef& masks) {
    expect(counts, "counts", {kAny}, DType::kI32);
    const std::int64_t num = counts.shape[0];
    expect(ends, "ends", {num + 1}, DType::kI64);
    expect(ids, "ids", {kAny}, DType::kI64);
    if (mask_of.given()) {
        expect(mask_of, "mask_of", {num}, DType::kI32);
        expect(masks, "masks", {kAny, kAny}, DType::kI32);
    }
    const auto* places = ends.as<std::int64_t>();
    require(places[0] == 0 && places[num] == ids.shape[0] && std::is_sorted(places, places + num + 1), "ends",
            "do not rise from 0 to the end of the ids");
    rows_.resize(static_cast<std::size_t>(num));
    for (std::int64_t i = 0; i < num; ++i) {
        Row& row = rows_[static_cast<std::size_t>(i)];
        row.count = counts.as<std::int32_t>()[i];
        require(row.count >= 0, "counts", "are negative");
        for (std::int64_t j = places[i]; j < places[i + 1]; ++j) {
            const std::int64_t id = ids.as<std::int64_t>()[j];
            require(id >= 0 && id <= std::numeric_limits<std::int32_t>::max(), "ids", "are none of tokens");
            row.named.push_back(static_cast<std::int32_t>(id));
        }
        const std::int64_t number = mask_of.given() ? mask_of.as<std::int32_t>()[i] : -1;
        if (number >= 0) {
            require(number < masks.shape[0], "mask_of", "names a mask that is not there");
            const auto* words = masks.as<std::uint32_t>() + number * masks.stride[0];
            row.mask.assign(words, words + masks.shape[1]);
        }
    }
}

WantedLogits WantedLogits::rows(std::int64_t first, std::int64_t count) const {
    WantedLogits some;
    if (!rows_.empty()) {
        require(Span{first, count}.within(static_cast<std::int64_t>(rows_.size())), "rows", "are not there");
        some.rows_.assign(rows_.begin() + first, rows_.begin() + first + count);
    }
    return some;
}

bool WantedLogits::fit(const Columns& logits) const {
    std::int64_t tokens = 0;
    for (const Span& span : *logits.spans) {
        tokens = std::max(tokens, span.first + span.count);
    }
    const auto fits = [tokens](const Row& row) {
        const auto words = static_cast<std::int64_t>(row.mask.size());
        return (words == 0 || words == (tokens + kBits - 1) / kBits) &&
               std::all_of(row.named.begin(), row.named.end(), [tokens](auto id) { return id < tokens; });
    };
    return rows_.empty() || (static_cast<std::int64_t>(rows_.size()) == logits.rows && logits.number_bytes == 4 &&
                             std::all_of(rows_.begin(), rows_.end(), fits));
}

std::vector<char> WantedLogits::to_bytes() const {
    std::vector<std::uint32_t> words;
    for (const Row& row : rows_) {
        words.push_back(static_cast<std::uint32_t>(row.count));
        words.push_back(static_cast<std::uint32_t>(row.named.size()));
        words.push_back(static_cast<std::uint32_t>(row.mask.size()));
        words.insert(words.end(), row.named.begin(), row.named.end());
        words.insert(words.end(), row.mask.begin(), row.mask.end());
    }
    std::vector<char> bytes(words.size() * 4);
    std::copy_n(reinterpret_cast<const char*>(words.data()), bytes.size(), bytes.data());
    return bytes;
}

bool WantedLogits::take_bytes(const std::vector<char>& bytes) {
    rows_.clear();
    const char* from = bytes.data();
    auto left = static_cast<std::int64_t>(bytes.size());
    const auto take = [&](auto* to, std::int64_t count) {
        if (count < 0 || count > left / 4) {
            return false;
        }
        std::copy_n(from, count * 4, reinterpret_cast<char*>(to));
        from += count * 4;
        left -= count * 4;
        return true;
    };
    while (left > 0) {
        std::int32_t head[3];
        if (!take(head, 3) || head[0] < 0 || head[1] < 0 || head[1] > left / 4 || head[2] < 0 || head[2] > left / 4) {
            return false;
        }
        Row row;
        row.count = head[0];
        row.named.resize(static_cast<std::size_t>(head[1]));
        row.mask.resize(static_cast<std::size_t>(head[2]));
        if (!take(row.named.data(), head[1]) || !take(row.mask.data(), head[2]) ||
            std::any_of(row.named.begin(), row.named.end(), [](auto id) { return id < 0; })) {
            return false;
        }
        rows_.push_back(std::move(row));
    }
    return true;
}

// A row with a mask has one more: whether it can be sampled at all is asked of all its logits.
std::int64_t WantedLogits::entries(std::int64_t row, const Span& span) const {
    return std::min<std::int64_t>(at(row).count, span.count) + (at(row).mask.empty() ? 0 : 1);
}

// Where each row's bytes begin, and where the last ones end.
std::vector<std::int64_t> WantedLogits::places(const Columns& logits, const Span& span) const {
    std::vector<std::int64_t> found(1);
    for (std::int64_t row = 0; row < logits.rows; ++row) {
        std::int64_t bytes = span.count * logits.number_bytes;
        if (!is_whole(row)) {
            const auto& named = at(row).named;
            const auto own = std::count_if(named.begin(), named.end(), [&](auto id) { return has(span, id); });
            bytes = entries(row, span) * static_cast<std::int64_t>(sizeof(Entry)) + own * 4;
        }
        found.push_back(found.back() + bytes);
    }
    return found;
}

std::int64_t WantedLogits::bytes_of(const Columns& logits, int host) const {
    return places(logits, span_of(logits, host)).back();
}

template <typename Body>
void WantedLogits::each_row(const Columns& logits, const Span& span, const Body& body) const {
    const std::vector<std::int64_t> begins = places(logits, span);
    Pool::instance().run([&](PoolThread& thread) {
        thread.each(logits.rows, [&](std::int64_t row) {
            char* x = static_cast<char*>(logits.data) + (row * logits.stride + span.first) * logits.number_bytes;
            body(row, x, begins[static_cast<std::size_t>(row)]);
        });
    });
}

void WantedLogits::pack(const Columns& logits, int host, char* to) const {
    const Span& span = span_of(logits, host);
    each_row(logits, span, [&](std::int64_t row, char* x, std::int64_t begin) {
        if (is_whole(row)) {
            std::memcpy(to + begin, x, static_cast<std::size_t>(span.count * logits.number_bytes));
        } else {
            pack_row(row, reinterpret_cast<float*>(x), span, to + begin);
        }
    });
}

// The likeliest, and then what the model says of those that are named.
void WantedLogits::pack_row(std::int64_t row, float* x, const Span& span, char* to) const {
    const auto& [count, named, mask] = at(row);
    std::vector<Entry> found;
    const auto find = [&](std::int64_t place) {
        found.push_back({x[place], static_cast<std::int32_t>(span.first + place)});
    };
    const std::int64_t best = span.count > 0 ? kernels().argmax(x, span.count) : 0;
    const bool good = span.count > 0 && std::isfinite(x[best]);
    if (span.count > 0 && (!good || !mask.empty())) {
        find(best);
    }
    char* values = to + entries(row, span) * static_cast<std::int64_t>(sizeof(Entry));
    for (const std::int32_t id : named) {
        if (has(span, id)) {
            std::memcpy(values, x + (id - span.first), 4);
            values += 4;
        }
    }
    for (const std::int32_t id : named) {
        if (has(span, id)) {
            x[id - span.first] = kNever;
        }
    }
    for (std::int64_t i = 0; i < span.count && !mask.empty(); ++i) {
        const std::int64_t id = span.first + i;
        x[i] = (mask[static_cast<std::size_t>(id / kBits)] >> id % kBits & 1) != 0 ? x[i] : kNever;
    }
    if (good) {
        for (const std::int64_t place : likeliest(x, span.count, count)) {
            find(place);
        }
    }
    found.resize(static_cast<std::size_t>(entries(row, span)));
    std::memcpy(to, found.data(), found.size() * sizeof(Entry));
}

void WantedLogits::clear(const Columns& logits, int host) const {
    const Span& span = span_of(logits, host);
    each_row(logits, span, [&](std::int64_t row, char* x, std::int64_t) {
        if (!is_whole(row)) {
            std::fill_n(reinterpret_cast<float*>(x), span.count, kNever);
        }
    });
}

bool WantedLogits::unpack(const Columns& logits, int host, const char* from) const {
    const Span& span = span_of(logits, host);
    std::atomic<bool> good{true};
    each_row(logits, span, [&](std::int64_t row, char* x, std::int64_t begin) {
        if (is_whole(row)) {
            std::memcpy(x, from + begin, static_cast<std::size_t>(span.count * logits.number_bytes));
        } else if (!unpack_row(row, reinterpret_cast<float*>(x), span, from + begin)) {
            good = false;
        }
    });
    return good;
}

bool WantedLogits::unpack_row(std::int64_t row, float* x, const Span& span, const char* from) const {
    for (std::int64_t i = entries(row, span); i > 0; --i, from += sizeof(Entry)) {
        Entry entry;
        std::memcpy(&entry, from, sizeof(entry));
        if (entry.id == kNobody) {
            continue;
        }
        if (!has(span, entry.id)) {
            return false;
        }
        x[entry.id - span.first] = entry.logit;
    }
    for (const std::int32_t id : at(row).named) {
        if (has(span, id)) {
            std::memcpy(x + (id - span.first), from, 4);
            from += 4;
        }
    }
    return true;
}

}  // namespace octavo
