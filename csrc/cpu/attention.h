// Attention within a run of the pool: the plan of a step, and its execution.
#pragma once

#include <vector>

#include "kernels.h"
#include "kv_pages.h"
#include "octavo/api.h"
#include "octavo/pool.h"

namespace octavo {

// Who makes a plan: one of several ranks that share the attention of a step. All see the same step, and each finds its
// part by itself, whatever its number of threads.
struct PlanShare {
    std::int64_t rank = 0, ranks = 1;
};

// How the attention of a step is divided into items. One plan serves all layers with the same window.
class AttentionPlan {
  public:
    // Sequences in host memory; checks nothing.
    void build(const BatchRef& batch, std::int64_t num_kv_heads, std::int64_t group, std::int64_t head_dim,
               std::int64_t window, const PlanShare& share = {}, bool both_ways = false);

    // In every thread.
    void run(PoolThread& thread, const AttentionJob& job);

    // What the plan is made of: items, in what order they are begun, and where partial results lie.
    const std::vector<AttentionItem>& items() const { return items_; }
    const std::vector<std::int64_t>& order() const { return order_; }
    const std::vector<float>& partials() const { return partials_; }

  private:
    // The queries of a sequence and a head that this plan is about.
    struct Run {
        std::int64_t sequence, head, first, end;
    };
    struct Split {
        std::size_t first_item;
        std::int64_t num_parts;
        std::int64_t part_floats;
    };

    void find_runs(const BatchRef& batch, std::int64_t num_kv_heads, std::int64_t window, const PlanShare& share);

    std::vector<Run> runs_;
    std::vector<AttentionItem> items_;
    std::vector<std::int64_t> order_;  // longest first
    std::vector<Split> splits_;
    std::vector<float> partials_;
    std::int64_t most_queries_ = 0;
};

// What the caller calls the arrays of a batch.
struct BatchNames {
    const char* cu_q = "cu_q";
    const char* seq_lens = "seq_lens";
    const char* tables = "block_tables";
    const char* starts = "starts";
};

// Throws unless the batch's numbers are possible: lengths, and block ids up to each sequence's last block.
void check_batch(const BatchRef& batch, std::int64_t num_tokens, std::int64_t num_blocks, std::int64_t block_size,
                 const BatchNames& names = {});

// The parts of a job that the pages decide, checked.
AttentionJob attention_job(const KvPages& pages, std::int64_t num_heads);

// Throws unless its numbers are possible; makes them part of a job.
void check_sparse(const BlockSparse& sparse, std::int64_t num_heads);
void put_sparse(AttentionJob& job, const BlockSparse& sparse, std::int64_t num_heads);

// The same for biases, and for queries that see the keys after them.
void check_bias(const AttentionOptions& options, std::int64_t num_heads);
void put_bias(AttentionJob& job, const AttentionOptions& options);

}  // namespace octavo
