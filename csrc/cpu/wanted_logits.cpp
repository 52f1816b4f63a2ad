#include "octavo/wanted_logits.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels.h"
#include "octavo/pool.h"
#include "octavo/sample.h"
#include "row_askers.h"

namespace octavo {
namespace {

constexpr std::int64_t kHead = 5;  // numbers before those of a row

const Span& span_of(const Columns& logits, int host) { return (*logits.spans)[static_cast<std::size_t>(host)]; }

}  // namespace

WantedLogits WantedLogits::rows(std::int64_t first, std::int64_t count) const {
    WantedLogits some;
    if (!rows_.empty()) {
        require(Span{first, count}.within(static_cast<std::int64_t>(rows_.size())), "rows", "are not there");
        some.rows_.assign(rows_.begin() + first, rows_.begin() + first + count);
        some.first_ = first_ + first;
        some.branches_ = branches_;
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
        return (words == 0 || words == (tokens + kMaskBits - 1) / kMaskBits) &&
               std::all_of(row.named.begin(), row.named.end(), [tokens](auto id) { return id < tokens; });
    };
    return rows_.empty() || (static_cast<std::int64_t>(rows_.size()) == logits.rows && logits.number_bytes == 4 &&
                             std::all_of(rows_.begin(), rows_.end(), fits));
}

std::vector<char> WantedLogits::to_bytes() const {
    std::vector<std::uint32_t> words;
    for (const Row& row : rows_) {
        for (const auto number : {row.count, row.top, row.asks, static_cast<std::int32_t>(row.named.size()),
                                  static_cast<std::int32_t>(row.mask.size())}) {
            words.push_back(static_cast<std::uint32_t>(number));
        }
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
        std::int32_t head[kHead];
        if (!take(head, kHead) || std::any_of(head, head + kHead, [](auto number) { return number < 0; }) ||
            head[3] > left / 4 || head[4] > left / 4) {
            return false;
        }
        if (head[0] > 0 && head[1] == 0 && head[4] > 0) {  // beside a mask the likeliest of all is always wanted
            return false;
        }
        Row row{head[0], head[1], head[2], {}, {}};
        row.named.resize(static_cast<std::size_t>(head[3]));
        row.mask.resize(static_cast<std::size_t>(head[4]));
        if (!take(row.named.data(), head[3]) || !take(row.mask.data(), head[4]) ||
            std::any_of(row.named.begin(), row.named.end(), [](auto id) { return id < 0; })) {
            return false;
        }
        rows_.push_back(std::move(row));
    }
    return true;
}

std::int64_t WantedLogits::entries(std::int64_t row, const Span& span) const {
    const std::int64_t top = std::min<std::int64_t>(row_at(row).top, span.count);
    const std::int64_t count = std::min<std::int64_t>(row_at(row).count, span.count);
    return row_at(row).mask.empty() ? std::max(top, count) : top + count;
}

// Where each row's bytes begin, and where the last ones end.
std::vector<std::int64_t> WantedLogits::places(const Columns& logits, const Span& span) const {
    std::vector<std::int64_t> found(1);
    for (std::int64_t row = 0; row < logits.rows; ++row) {
        std::int64_t bytes = span.count * logits.number_bytes;
        if (!is_whole(row)) {
            const auto& named = row_at(row).named;
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

// The likeliest, and then what the model says of those that are named. If there are questions, what goes is then no
// more of the row.
void WantedLogits::pack_row(std::int64_t row, float* x, const Span& span, char* to) const {
    const Row& wanted = row_at(row);
    std::vector<Entry> found;
    const auto add = [&](const float* of, std::int64_t count) {
        const auto places = count == 1 ? std::vector<std::int64_t>{draw_loops().best(of, span.count)}
                                       : likeliest(of, span.count, count);
        for (const std::int64_t place : places) {
            if (of[place] > kNever) {
                found.push_back({x[place], static_cast<std::int32_t>(span.first + place)});
            }
        }
    };
    const std::int64_t best = span.count > 0 ? draw_loops().best(x, span.count) : 0;
    const bool good = span.count > 0 && std::isfinite(x[best]);
    if (span.count > 0 && !good) {
        found.push_back({x[best], static_cast<std::int32_t>(span.first + best)});
    }
    char* values = to + entries(row, span) * static_cast<std::int64_t>(sizeof(Entry));
    for (const std::int32_t id : wanted.named) {
        if (has(span, id)) {
            float& logit = x[id - span.first];
            std::memcpy(values, &logit, 4);
            values += 4;
            logit = kNever;
        }
    }
    if (good && wanted.mask.empty()) {
        add(x, std::max(wanted.top, wanted.count));
    } else if (good) {
        add(x, wanted.top);
        std::vector<float> open(x, x + span.count);
        leave_masked(open.data(), span, wanted.mask);
        add(open.data(), wanted.count);
    }
    for (std::size_t i = 0; i < found.size() && wanted.asks != 0; ++i) {
        x[found[i].id - span.first] = kNever;
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
    for (const std::int32_t id : row_at(row).named) {
        if (has(span, id)) {
            std::memcpy(x + (id - span.first), from, 4);
            from += 4;
        }
    }
    return true;
}

bool WantedLogits::asks() const {
    return std::any_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.asks != 0; });
}

std::unique_ptr<RowAskers> WantedLogits::askers(const Columns& logits) const {
    std::vector<Asked> asked;
    for (Asked each : branches_->asked) {
        each.row -= first_;
        if (each.row >= 0 && each.row < logits.rows) {
            asked.push_back(each);
        }
    }
    std::vector<const RowAskers::Mask*> masks;
    for (const Row& row : rows_) {
        masks.push_back(&row.mask);
    }
    return std::make_unique<RowAskers>(*branches_, asked, logits, std::move(masks));
}

bool WantedLogits::answer(const Columns& logits, int host, const std::vector<char>& questions,
                          std::vector<char>& answers) const {
    std::vector<Question> asked;
    const char* from = questions.data();
    for (auto left = static_cast<std::int64_t>(questions.size()); left > 0;) {
        const Question& question = asked.emplace_back();
        if (!take(from, left, asked.back()) || question.fixed.row < 0 ||
            question.fixed.row >= static_cast<std::int64_t>(rows_.size()) || row_at(question.fixed.row).asks == 0) {
            return false;
        }
    }
    std::vector<Answer> found(asked.size());
    std::atomic<bool> good{true};
    const Span& span = span_of(logits, host);
    Pool::instance().run([&](PoolThread& thread) {
        thread.each(static_cast<std::int64_t>(asked.size()), [&](std::int64_t i) {
            const Question& question = asked[static_cast<std::size_t>(i)];
            const Row& row = row_at(question.fixed.row);
            const float* x = static_cast<const float*>(logits.data) + question.fixed.row * logits.stride + span.first;
            const bool elsewhere = question.fixed.kind == Question::kToken && question.fixed.host != host;
            if (!elsewhere && !answer_of(question, x, span, row.mask, found[static_cast<std::size_t>(i)])) {
                good = false;
            }
        });
    });
    for (const Answer& each : found) {
        append(answers, each);
    }
    return good;
}

}  // namespace octavo
