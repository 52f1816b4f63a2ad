#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "octavo/check.h"

namespace octavo {
namespace {

// Queries x heads of an item. Keys and values are packed once for all of them, and what they sum up stays in the second
// cache; fewer than kMostRows where threads would have less than kItemsEach to share.
constexpr std::int64_t kLeastRows = 64, kMostRows = 256, kMostSums = 1 << 15, kItemsEach = 4;

// all: rows of sequences with several queries.
std::int64_t rows_of_items(std::int64_t all, std::int64_t head_dim) {
    const std::int64_t threads = Pool::instance().size();
    std::int64_t rows = std::clamp(kMostSums / head_dim / kLeastRows * kLeastRows, kLeastRows, kMostRows);
    while (rows > kLeastRows && all / rows < kItemsEach * threads) {
        rows /= 2;
    }
    return std::max(rows, kLeastRows);
}

// A sequence of a step: so many queries, the first of which has this position.
struct Queries {
    std::int64_t count, position;
};

Queries queries_of(const BatchRef& batch, std::int64_t sequence) {
    const auto* cu_q = batch.cu_q.as<std::int32_t>() + sequence;
    const std::int64_t count = cu_q[1] - cu_q[0];
    return {count, batch.seq_lens.as<std::int32_t>()[sequence] - count};
}

std::int64_t first_key(std::int64_t position, std::int64_t window) {
    return window > 0 ? std::max<std::int64_t>(0, position - window + 1) : 0;
}

constexpr std::int64_t kSharedQueries = 16;  // ranks share queries in pieces of so many
constexpr std::int64_t kPacking = 2;         // what it takes to pack a key, in queries
constexpr std::int64_t kEverything = std::numeric_limits<std::int64_t>::max();

struct Reached {
    std::int64_t queries, work;
};

// The queries of a sequence that come before the place where so much work is done, by the middles of their pieces; and
// their work, in no unit. It grows with the keys, which are packed first.
Reached reached(const Queries& all, std::int64_t window, std::int64_t work) {
    Reached found{0, 0};
    while (found.queries < all.count) {
        const std::int64_t count = std::min(kSharedQueries, all.count - found.queries);
        const std::int64_t position = all.position + found.queries,
                           keys = position + count - first_key(position, window);
        const std::int64_t more = keys * (count + kPacking);
        if (found.work + more / 2 >= work) {
            break;
        }
        found = {found.queries + count, found.work + more};
    }
    return found;
}

void check_per_head(const TensorRef& tensor, const char* name, std::int64_t num_heads) {
    if (tensor.given()) {
        expect(tensor, name, {num_heads}, DType::kF32);
    }
}

}  // namespace

// The work of all heads lies on a line, one head after the other and in it one sequence after the other, and each rank
// has as much of it as the others. So where heads divide evenly between ranks, each has whole ones.
void AttentionPlan::find_runs(const BatchRef& batch, std::int64_t num_kv_heads, std::int64_t window,
                              const PlanShare& share) {
    runs_.clear();
    const std::int64_t sequences = batch.seq_lens.shape[0];
    std::vector<std::int64_t> before{0};  // work of a head: of the sequences before each
    for (std::int64_t i = 0; i < sequences && share.ranks > 1; ++i) {
        before.push_back(before.back() + reached(queries_of(batch, i), window, kEverything).work);
    }
    const auto border = [&](std::int64_t rank) { return before.back() * num_kv_heads * rank / share.ranks; };
    for (std::int64_t i = 0; i < sequences; ++i) {
        const Queries all = queries_of(batch, i);
        for (std::int64_t head = 0; head < num_kv_heads; ++head) {
            Run run{i, head, 0, all.count};
            if (share.ranks > 1) {
                const std::int64_t begin = before.back() * head + before[static_cast<std::size_t>(i)];
                run.first = reached(all, window, border(share.rank) - begin).queries;
                run.end = reached(all, window, border(share.rank + 1) - begin).queries;
            }
            if (run.first < run.end) {
                runs_.push_back(run);
            }
        }
    }
}

void AttentionPlan::build(const BatchRef& batch, std::int64_t num_kv_heads, std::int64_t group, std::int64_t head_dim,
                          std::int64_t window, const PlanShare& share, bool both_ways) {
    items_.clear();
    splits_.clear();
    find_runs(batch, num_kv_heads, window, share);
    std::int64_t rows = 0;
    for (const Run& run : runs_) {
        rows += queries_of(batch, run.sequence).count > 1 ? (run.end - run.first) * group : 0;
    }
    most_queries_ = std::max<std::int64_t>(1, rows_of_items(rows, head_dim) / group);
    std::int64_t num_partials = 0;
    for (const Run& run : runs_) {
        const Queries all = queries_of(batch, run.sequence);
        const auto* table = batch.tables.as<std::int32_t>() + run.sequence * batch.tables.stride[0];
        const std::int64_t token = batch.cu_q.as<std::int32_t>()[run.sequence];
        const std::int64_t start = batch.starts.given() ? batch.starts.as<std::int32_t>()[run.sequence] : 0;
        for (std::int64_t q = run.first; q < run.end; q += most_queries_) {
            const std::int64_t count = std::min(most_queries_, run.end - q), position = all.position + q;
            const std::int64_t first = std::max(first_key(position, window), start);
            const std::int64_t end = both_ways ? all.position + all.count : position + count;
            AttentionItem item{table, run.head, token + q, count, position, first, end, nullptr};
            if (all.count > 1 || (end - 1) / kSplitKeys == first / kSplitKeys) {
                items_.push_back(item);
                continue;
            }
            const std::int64_t part = count * group * (head_dim + 2);
            splits_.push_back({items_.size(), 0, part});
            for (std::int64_t key = first; key < end; key = (key / kSplitKeys + 1) * kSplitKeys) {
                item.first_key = key;
                item.end_key = std::min(end, (key / kSplitKeys + 1) * kSplitKeys);
                items_.push_back(item);
                ++splits_.back().num_parts;
                num_partials += part;
            }
        }
    }
    partials_.resize(static_cast<std::size_t>(num_partials));
    float* next = partials_.data();
    for (const Split& split : splits_) {
        for (std::int64_t part = 0; part < split.num_parts; ++part, next += split.part_floats) {
            items_[split.first_item + static_cast<std::size_t>(part)].partial = next;
        }
    }
    order_.resize(items_.size());
    std::iota(order_.begin(), order_.end(), 0);
    const auto cost = [this](std::int64_t i) {
        const AttentionItem& item = items_[static_cast<std::size_t>(i)];
        return (item.end_key - item.first_key) * (item.num_queries + kPacking);
    };
    std::stable_sort(order_.begin(), order_.end(), [&](std::int64_t a, std::int64_t b) { return cost(a) > cost(b); });
}

void AttentionPlan::run(PoolThread& thread, const AttentionJob& job) {
    const Kernels& k = kernels();
    const auto threads = static_cast<std::size_t>(Pool::instance().size());
    const auto item = [this](std::size_t i) { return &items_[static_cast<std::size_t>(order_[i])]; };
    thread.each(static_cast<std::int64_t>(order_.size()), [&](std::int64_t part) {
        const auto i = static_cast<std::size_t>(part);
        k.attend(job, *item(i), i + threads < order_.size() ? item(i + threads) : nullptr,
                 thread.scratch(k.attend_scratch(job, most_queries_)));
    });
    if (!splits_.empty()) {
        thread.each(static_cast<std::int64_t>(splits_.size()), [&](std::int64_t i) {
            const Split& split = splits_[static_cast<std::size_t>(i)];
            k.merge(job, items_[split.first_item], split.num_parts, split.part_floats);
        });
    }
}

void check_batch(const BatchRef& batch, std::int64_t num_tokens, std::int64_t num_blocks, std::int64_t block_size,
                 const BatchNames& names) {
    expect(batch.seq_lens, names.seq_lens, {kAny}, DType::kI32);
    const std::int64_t num_sequences = batch.seq_lens.shape[0];
    expect(batch.cu_q, names.cu_q, {num_sequences + 1}, DType::kI32);
    expect(batch.tables, names.tables, {num_sequences, kAny}, DType::kI32);
    if (batch.starts.given()) {
        expect(batch.starts, names.starts, {num_sequences}, DType::kI32);
    }
    const auto* cu_q = batch.cu_q.as<std::int32_t>();
    const auto* seq_lens = batch.seq_lens.as<std::int32_t>();
    require(cu_q[0] == 0 && cu_q[num_sequences] == num_tokens, names.cu_q,
            "does not run from 0 to the number of tokens");
    for (std::int64_t i = 0; i < num_sequences; ++i) {
        const std::int64_t num_queries = std::int64_t{cu_q[i + 1]} - cu_q[i], length = seq_lens[i];
        require(num_queries >= 0, names.cu_q, "falls");
        require(length >= num_queries, names.seq_lens, "is less than a sequence's queries");
        if (num_queries == 0) {
            continue;
        }
        const std::int64_t start = batch.starts.given() ? batch.starts.as<std::int32_t>()[i] : 0;
        require(start >= 0 && start <= length - num_queries, names.starts, "lies outside of what a query sees");
        const std::int64_t used = (length - 1) / block_size + 1;
        require(used <= batch.tables.shape[1], names.tables, "has fewer blocks than a sequence uses");
        const auto* table = batch.tables.as<std::int32_t>() + i * batch.tables.stride[0];
        for (std::int64_t j = 0; j < used; ++j) {
            require(table[j] >= 0 && table[j] < num_blocks, names.tables, "names a block that is not there");
        }
    }
}

AttentionJob attention_job(const KvPages& pages, std::int64_t num_heads) {
    const std::int64_t dim = pages.head_dim;
    require(pages.block_size % 8 == 0, "kv", "needs a block size that is a multiple of 8");
    require(dim % 8 == 0 && dim > 0 && dim <= kMostHeadDim, "kv",
            "needs a head_dim that is a multiple of 8, at most 1024");
    require(num_heads % pages.num_heads == 0, "queries", "has heads that do not share those of kv");
    AttentionJob job{};
    job.kv = pages;
    job.group = num_heads / pages.num_heads;
    return job;
}

void check_sparse(const BlockSparse& sparse, std::int64_t num_heads) {
    for (const std::int64_t number :
         {sparse.local_blocks, sparse.vert_stride, sparse.block_size, sparse.head_sliding_step, sparse.tp_rank}) {
        require(number > -kMostElements && number < kMostElements, "sparse", "is out of range");
    }
    require(volume({sparse.tp_rank < 0 ? 0 : sparse.tp_rank + 1, num_heads, std::abs(sparse.head_sliding_step)}) <
                kMostElements,
            "sparse", "is out of range");
    require(sparse.vert_stride <= 1 || sparse.block_size > 0, "sparse", "has blocks of no keys");
    require(sparse.local_blocks >= 0, "sparse", "has a negative number of local blocks");
    require(sparse.tp_rank >= 0, "sparse", "has a negative rank");
}

void put_sparse(AttentionJob& job, const BlockSparse& sparse, std::int64_t num_heads) {
    const std::int64_t step = sparse.head_sliding_step;
    job.local_blocks = sparse.local_blocks;
    job.vert_stride = sparse.vert_stride;
    job.sparse_block = sparse.block_size;
    job.sparse_head = step >= 0 ? step : 0;
    job.sparse_kv_head = step >= 0 ? 0 : -step;
    job.sparse_offset = sparse.tp_rank * (step >= 0 ? num_heads * step : -step * job.kv.num_heads) + 1;
}

void check_bias(const AttentionOptions& options, std::int64_t num_heads) {
    require(!options.both_ways || (options.window == 0 && options.sparse.vert_stride <= 1), "both_ways",
            "goes with no window and with no sparse attention");
    if (options.bias.given()) {
        expect(options.bias, "bias", {num_heads, kAny}, DType::kF32);
        require(options.bias.shape[1] % 2 == 1, "bias", "has no number in the middle");
        require(options.bias.shape[0] == 1 || options.bias.stride[0] == options.bias.shape[1], "bias", "is not dense");
    }
}

void put_bias(AttentionJob& job, const AttentionOptions& options) {
    job.bias = options.bias.as<float>();
    job.bias_reach = options.bias.given() ? options.bias.shape[1] / 2 : 0;
    job.both_ways = options.both_ways;
}

void check::paged_attention(const TensorRef& out, const TensorRef& queries, const KvCache& kv, const BatchRef& batch,
                            const AttentionOptions& options) {
    expect(queries, "queries", {kAny, kAny, kAny});
    const std::int64_t num_tokens = queries.shape[0], num_heads = queries.shape[1];
    const KvPages pages = kv_pages(kv, queries.shape[2]);
    attention_job(pages, num_heads);
    require(queries.is_float(), "queries", "must be floats");
    expect(out, "out", {num_tokens, num_heads, pages.head_dim}, queries.dtype);
    check_batch(batch, num_tokens, pages.num_blocks, pages.block_size);
    check_sparse(options.sparse, num_heads);
    require(options.window >= 0, "window", "is negative");
    require(std::isfinite(options.scale), "scale", "is not finite");
    require(options.soft_cap >= 0 && std::isfinite(options.soft_cap), "soft_cap", "is negative or not finite");
    check_per_head(options.alibi, "alibi", num_heads);
    check_per_head(options.sinks, "sinks", num_heads);
    check_bias(options, num_heads);
    expect_apart(out, "out",
                 {&queries, &kv.keys, &kv.values, &kv.key_scale, &kv.value_scale, &batch.cu_q, &batch.seq_lens,
                  &batch.tables, &batch.starts, &options.alibi, &options.sinks, &options.bias});
}

void paged_attention(const TensorRef& out, const TensorRef& queries, const KvCache& kv, const BatchRef& batch,
                     const AttentionOptions& options) {
    check::paged_attention(out, queries, kv, batch, options);
    if (out.size() == 0) {
        return;
    }
    const std::int64_t num_tokens = queries.shape[0], num_heads = queries.shape[1];
    AttentionJob job = attention_job(kv_pages(kv, queries.shape[2]), num_heads);
    const std::int64_t head_dim = job.kv.head_dim;
    put_sparse(job, options.sparse, num_heads);
    job.scale = options.scale;
    job.soft_cap = options.soft_cap;
    job.window = options.window;
    job.alibi = options.alibi.as<float>();
    job.sinks = options.sinks.as<float>();
    put_bias(job, options);

    const std::int64_t row = num_heads * head_dim;
    const bool wide = queries.dtype == DType::kF32;
    std::vector<float> copies(wide ? 0 : static_cast<std::size_t>(2 * num_tokens * row));
    job.queries = wide ? queries.as<float>() : copies.data();
    job.query_token = wide ? queries.stride[0] : row;
    job.query_head = wide ? queries.stride[1] : head_dim;
    job.out = wide ? out.as<float>() : copies.data() + num_tokens * row;
    job.out_token = wide ? out.stride[0] : row;
    job.out_head = wide ? out.stride[1] : head_dim;

    AttentionPlan plan;
    plan.build(batch, job.kv.num_heads, job.group, head_dim, options.window, {}, options.both_ways);
    const auto bf16_row = [](const TensorRef& x, std::int64_t token, std::int64_t head) {
        return x.as<std::uint16_t>() + token * x.stride[0] + head * x.stride[1];
    };
    Pool::instance().run([&](PoolThread& thread) {
        const auto each_head = [&](auto convert) {
            thread.each(wide ? 0 : num_tokens, [&](std::int64_t token) {
                for (std::int64_t head = 0; head < num_heads; ++head) {
                    convert(token, head, token * row + head * head_dim);
                }
            });
        };
        each_head([&](std::int64_t token, std::int64_t head, std::int64_t place) {
            kernels().to_float(queries.dtype, bf16_row(queries, token, head), head_dim, copies.data() + place);
        });
        plan.run(thread, job);
        each_head([&](std::int64_t token, std::int64_t head, std::int64_t place) {
            kernels().from_float(queries.dtype, job.out + place, head_dim, bf16_row(out, token, head));
        });
    });
}

}  // namespace octavo
