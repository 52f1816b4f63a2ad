#include <cmath>
#include <limits>
#include <vector>

#include "element.h"
#include "ref.h"

namespace octavo::ref {
namespace {

using Row = std::vector<double>;

Row row_of(const TensorRef& tensor, std::int64_t i, std::int64_t j) {
    Row row;
    for (std::int64_t d = 0; d < tensor.shape[2]; ++d) {
        row.push_back(get(tensor, i, j, d));
    }
    return row;
}

double dot(const Row& a, const Row& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        sum += a[i] * b[i];
    }
    return sum;
}

// Keys or values (kind 0 or 1) of a sequence for one key-value head, in order, from the pages its table names.
std::vector<Row> pages(const TensorRef& kv, const BatchRef& batch, std::int64_t sequence, std::int64_t head,
                       std::int64_t kind, std::int64_t first, std::int64_t end) {
    std::vector<Row> rows(static_cast<std::size_t>(first));
    for (std::int64_t key = first; key < end; ++key) {
        const std::int64_t block = get_int(batch.tables, sequence, key / kv.shape[3]);
        rows.emplace_back();
        for (std::int64_t d = 0; d < kv.shape[4]; ++d) {
            rows.back().push_back(get(kv, block, head, kind, key % kv.shape[3], d));
        }
    }
    return rows;
}

// What a query at `position` takes from the keys [first, position].
Row attend(const Row& query, const std::vector<Row>& keys, const std::vector<Row>& values, std::int64_t first,
           std::int64_t position, const AttentionOptions& options, std::int64_t head) {
    const double cap = static_cast<double>(options.soft_cap), scale = static_cast<double>(options.scale);
    double highest = options.sinks.given() ? get(options.sinks, head) : -std::numeric_limits<double>::infinity();
    Row weights;
    for (std::int64_t key = first; key <= position; ++key) {
        double score = dot(query, keys[static_cast<std::size_t>(key)]) * scale;
        score = cap > 0 ? cap * std::tanh(score / cap) : score;
        score += options.alibi.given() ? get(options.alibi, head) * static_cast<double>(key - position) : 0;
        highest = std::fmax(highest, score);
        weights.push_back(score);
    }
    double total = options.sinks.given() ? std::exp(get(options.sinks, head) - highest) : 0;
    for (double& weight : weights) {
        weight = std::exp(weight - highest);
        total += weight;
    }
    Row out(query.size(), 0);
    for (std::size_t i = 0; i < weights.size(); ++i) {
        const Row& value = values[static_cast<std::size_t>(first) + i];
        for (std::size_t d = 0; d < out.size(); ++d) {
            out[d] += weights[i] / total * value[d];
        }
    }
    return out;
}

}  // namespace

void cache_write(const TensorRef& kv, const TensorRef& keys, const TensorRef& values, const TensorRef& slots) {
    check::cache_write(kv, keys, values, slots);
    const std::int64_t size = kv.shape[3];
    for (std::int64_t token = 0; token < keys.shape[0]; ++token) {
        const std::int64_t slot = get_int(slots, token);
        for (std::int64_t head = 0; slot >= 0 && head < kv.shape[1]; ++head) {
            for (std::int64_t d = 0; d < kv.shape[4]; ++d) {
                put(kv, get(keys, token, head, d), slot / size, head, 0, slot % size, d);
                put(kv, get(values, token, head, d), slot / size, head, 1, slot % size, d);
            }
        }
    }
}

void paged_attention(const TensorRef& out, const TensorRef& queries, const TensorRef& kv, const BatchRef& batch,
                     const AttentionOptions& options) {
    check::paged_attention(out, queries, kv, batch, options);
    const std::int64_t heads = queries.shape[1], group = heads / kv.shape[1];
    const auto first_key = [&](std::int64_t position) {
        return options.window > 0 && position >= options.window ? position - options.window + 1 : 0;
    };
    for (std::int64_t sequence = 0; sequence < batch.seq_lens.shape[0]; ++sequence) {
        const std::int64_t begin = get_int(batch.cu_q, sequence), end = get_int(batch.cu_q, sequence + 1);
        const std::int64_t length = get_int(batch.seq_lens, sequence), before = length - (end - begin);
        for (std::int64_t head = 0; head < heads && begin < end; ++head) {
            const auto keys = pages(kv, batch, sequence, head / group, 0, first_key(before), length);
            const auto values = pages(kv, batch, sequence, head / group, 1, first_key(before), length);
            for (std::int64_t token = begin; token < end; ++token) {
                const std::int64_t position = before + token - begin;
                const Row result =
                    attend(row_of(queries, token, head), keys, values, first_key(position), position, options, head);
                for (std::size_t d = 0; d < result.size(); ++d) {
                    put(out, result[d], token, head, d);
                }
            }
        }
    }
}

void merge_states(const TensorRef& out, const TensorRef& parts, const TensorRef& lse) {
    check::merge_states(out, parts, lse);
    for (std::int64_t token = 0; token < out.shape[0]; ++token) {
        for (std::int64_t head = 0; head < out.shape[1]; ++head) {
            double highest = get(lse, 0, token, head), total = 0;
            for (std::int64_t part = 0; part < parts.shape[0]; ++part) {
                highest = std::fmax(highest, get(lse, part, token, head));
            }
            // Parts without keys (-inf) hold anything, and where no part has keys they are averaged.
            const auto weight = [&](std::int64_t part) {
                const double score = get(lse, part, token, head);
                return score == highest ? 1 : std::exp(score - highest);
            };
            for (std::int64_t part = 0; part < parts.shape[0]; ++part) {
                total += weight(part);
            }
            for (std::int64_t d = 0; d < out.shape[2]; ++d) {
                double sum = 0;
                for (std::int64_t part = 0; part < parts.shape[0]; ++part) {
                    sum += weight(part) > 0 ? weight(part) * get(parts, part, token, head, d) : 0;
                }
                put(out, sum / total, token, head, d);
            }
        }
    }
}

}  // namespace octavo::ref
