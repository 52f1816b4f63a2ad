#include "cpu/attention.h"

#include <pybind11/stl.h>

#include <limits>
#include <tuple>
#include <vector>

#include "bind.h"
#include "octavo/team.h"

namespace py = pybind11;
using namespace py::literals;

namespace octavo::bind {
namespace {

constexpr std::int64_t kMostSize = std::int64_t{1} << 16;  // of heads, groups and dimensions

TensorRef numbers(std::vector<std::int32_t>& of, int ndim = 1) {
    TensorRef tensor;
    tensor.data = of.data();
    tensor.dtype = DType::kI32;
    tensor.ndim = ndim;
    tensor.shape[0] = static_cast<std::int64_t>(of.size());
    tensor.shape[1] = 1;
    tensor.stride[0] = tensor.stride[1] = 1;
    return tensor;
}

// (sequence, kv_head, first query, queries, first key, end key, floats before its partial result or -1)
using Item =
    std::tuple<std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;

std::vector<Item> plan_attention(const std::vector<std::int32_t>& q_lens, std::vector<std::int32_t> seq_lens,
                                 std::int64_t num_kv_heads, std::int64_t group, std::int64_t head_dim,
                                 std::int64_t window, std::int64_t rank, std::int64_t ranks) {
    require(q_lens.size() == seq_lens.size(), "seq_lens", "has another length than q_lens");
    require(num_kv_heads > 0 && num_kv_heads < kMostSize, "num_kv_heads", "is out of range");
    require(group > 0 && group < kMostSize, "group", "is out of range");
    require(head_dim > 0 && head_dim < kMostSize, "head_dim", "is out of range");
    require(window >= 0, "window", "is negative");
    require(ranks > 0 && ranks <= Team::kMostRanks, "ranks", "is out of range");
    require(rank >= 0 && rank < ranks, "rank", "is not one of the ranks");
    std::vector<std::int32_t> cu_q{0}, tables(seq_lens.size());
    for (const std::int32_t count : q_lens) {
        require(count >= 0 && count <= std::numeric_limits<std::int32_t>::max() - cu_q.back(), "q_lens",
                "is out of range");
        cu_q.push_back(cu_q.back() + count);
    }
    const BatchRef batch{numbers(cu_q), numbers(seq_lens), numbers(tables, 2)};
    check_batch(batch, cu_q.back(), 1, std::numeric_limits<std::int32_t>::max());
    AttentionPlan plan;
    plan.build(batch, num_kv_heads, group, head_dim, window, {rank, ranks});
    std::vector<Item> items;
    for (const std::int64_t i : plan.order()) {
        const AttentionItem& item = plan.items()[static_cast<std::size_t>(i)];
        const std::int64_t sequence = item.table - tables.data();
        items.emplace_back(sequence, item.kv_head, item.first_token - cu_q[static_cast<std::size_t>(sequence)],
                           item.num_queries, item.first_key, item.end_key,
                           item.partial ? item.partial - plan.partials().data() : -1);
    }
    return items;
}

}  // namespace

void bind_attention_plan(py::module_& module) {
    module.def("plan_attention", &plan_attention, "q_lens"_a, "seq_lens"_a, "num_kv_heads"_a, "group"_a, "head_dim"_a,
               "window"_a = 0, "rank"_a = 0, "ranks"_a = 1,
               "What threads of a rank work on, in the order they begin it: (sequence, kv_head, first query, queries, "
               "first key, end key, floats before its partial result or -1).");
}

}  // namespace octavo::bind
