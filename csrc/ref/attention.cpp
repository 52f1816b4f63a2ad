#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cache.h"
#include "element.h"
#include "ref.h"

namespace octavo::ref {
namespace {

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

// Keys or values of a sequence for one key-value head, in order, from the pages its table names.
std::vector<Row> pages(const Cache& cache, const BatchRef& batch, std::int64_t sequence, std::int64_t head, Kind kind,
                       std::int64_t first, std::int64_t end) {
    std::vector<Row> rows(static_cast<std::size_t>(first));
    for (std::int64_t key = first; key < end; ++key) {
        const std::int64_t block = get_int(batch.tables, sequence, key / cache.block_size);
        rows.push_back(cache.get(kind, block, head, key % cache.block_size));
    }
    return rows;
}

// Whether sparse attention lets a query see a key that is not after it.
bool sees(const BlockSparse& sparse, std::int64_t position, std::int64_t key, std::int64_t head, std::int64_t heads,
          std::int64_t kv_head, std::int64_t kv_heads) {
    if (sparse.vert_stride <= 1) {
        return true;
    }
    const std::int64_t step = sparse.head_sliding_step;
    const std::int64_t offset =
        step >= 0 ? (sparse.tp_rank * heads + head) * step + 1 : (sparse.tp_rank * kv_heads + kv_head) * -step + 1;
    const std::int64_t block = key / sparse.block_size, own = position / sparse.block_size;
    return (block + offset) % sparse.vert_stride == 0 || block > own - sparse.local_blocks;
}

// What a query at `position` takes from `seen` keys, which are in order.
Row attend(const Row& query, const std::vector<Row>& keys, const std::vector<Row>& values,
           const std::vector<std::int64_t>& seen, std::int64_t position, const AttentionOptions& options,
           std::int64_t head) {
    const double cap = static_cast<double>(options.soft_cap), scale = static_cast<double>(options.scale);
    double highest = options.sinks.given() ? get(options.sinks, head) : -std::numeric_limits<double>::infinity();
    Row weights;
    for (const std::int64_t key : seen) {
        double score = dot(query, keys[static_cast<std::size_t>(key)]) * scale;
        score = cap > 0 ? cap * std::tanh(score / cap) : score;
        score += options.alibi.given() ? get(options.alibi, head) * static_cast<double>(key - position) : 0;
        if (options.bias.given()) {
            const std::int64_t reach = options.bias.shape[1] / 2;
            score += get(options.bias, head, reach + std::clamp(key - position, -reach, reach));
        }
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
        const Row& value = values[static_cast<std::size_t>(seen[i])];
        for (std::size_t d = 0; d < out.size(); ++d) {
            out[d] += weights[i] / total * value[d];
        }
    }
    return out;
}

}  // namespace

void paged_attention(const TensorRef& out, const TensorRef& queries, const KvCache& kv, const BatchRef& batch,
                     const AttentionOptions& options) {
    check::paged_attention(out, queries, kv, batch, options);
    const Cache cache(kv, queries.shape[2]);
    const std::int64_t heads = queries.shape[1], group = heads / cache.heads;
    const auto first_key = [&](std::int64_t position) {
        return options.window > 0 && position >= options.window ? position - options.window + 1 : 0;
    };
    for (std::int64_t sequence = 0; sequence < batch.seq_lens.shape[0]; ++sequence) {
        const std::int64_t begin = get_int(batch.cu_q, sequence), end = get_int(batch.cu_q, sequence + 1);
        const std::int64_t length = get_int(batch.seq_lens, sequence), before = length - (end - begin);
        const std::int64_t start = batch.starts.given() ? get_int(batch.starts, sequence) : 0;
        for (std::int64_t head = 0; head < heads && begin < end; ++head) {
            const auto keys = pages(cache, batch, sequence, head / group, Kind::kKeys, first_key(before), length);
            const auto values = pages(cache, batch, sequence, head / group, Kind::kValues, first_key(before), length);
            for (std::int64_t token = begin; token < end; ++token) {
                const std::int64_t position = before + token - begin;
                std::vector<std::int64_t> seen;
                const std::int64_t last = options.both_ways ? length - 1 : position;
                for (std::int64_t key = std::max(first_key(position), start); key <= last; ++key) {
                    if (sees(options.sparse, position, key, head, heads, head / group, cache.heads)) {
                        seen.push_back(key);
                    }
                }
                const Row result = attend(row_of(queries, token, head), keys, values, seen, position, options, head);
                for (std::size_t d = 0; d < result.size(); ++d) {
                    put(out, result[d], token, head, d);
                }
            }
        }
    }
}

}  // namespace octavo::ref
