// Defines the ops of octavo/api.h as functions of a Python module: the kernels where this file is included in namespace
// octavo, their definitions where it is included in octavo::ref.

void bind_ops(py::module_& module) {
    using namespace py::literals;
    const py::call_guard<py::gil_scoped_release> free;
    module.def("cache_write", &cache_write, "kv"_a, "keys"_a, "values"_a, "slots"_a, free);
    module.def(
        "paged_attention",
        [](const TensorRef& out, const TensorRef& queries, const KvCache& kv, const TensorRef& cu_q,
           const TensorRef& seq_lens, const TensorRef& block_tables, float scale, std::int64_t window, float soft_cap,
           const TensorRef& alibi, const TensorRef& sinks, const std::vector<std::int64_t>& sparse,
           const TensorRef& bias, bool both_ways, const TensorRef& starts) {
            (paged_attention)(out, queries, kv, {cu_q, seq_lens, block_tables, starts},
                              {scale, window, soft_cap, alibi, sinks, bind::block_sparse(sparse), bias, both_ways});
        },
        "out"_a, "queries"_a, "kv"_a, "cu_q"_a, "seq_lens"_a, "block_tables"_a, "scale"_a, "window"_a = 0,
        "soft_cap"_a = 0.0F, "alibi"_a = py::none(), "sinks"_a = py::none(), "sparse"_a = std::vector<std::int64_t>(),
        "bias"_a = py::none(), "both_ways"_a = false, "starts"_a = py::none(), free);
    module.def("rotary", &rotary, "heads"_a, "positions"_a, "cos"_a, "sin"_a, "rotated"_a, "interleaved"_a = false,
               free);
    module.def("rms_norm", &rms_norm, "out"_a, "x"_a, "weight"_a, "eps"_a, free);
    module.def("silu_and_mul", &silu_and_mul, "out"_a, "x"_a, free);
    module.def("linear_recurrence", &linear_recurrence, "out"_a, "state"_a, "queries"_a, "keys"_a, "values"_a,
               "decays"_a, "rates"_a = py::none(), free);
    module.def("linear", &linear, "out"_a, "x"_a, "weight"_a, "bias"_a = py::none(), free);
    module.def("weight_rows", &weight_rows, "out"_a, "weight"_a, "rows"_a, free);
    const auto none = py::none();
    module.def(
        "sample",
        [](const TensorRef& ids, const TensorRef& logits, const TensorRef& rows, const TensorRef& temperature,
           const TensorRef& top_k, const TensorRef& top_p, const TensorRef& min_p, const TensorRef& seed,
           const TensorRef& branch, const TensorRef& index, const TensorRef& filters, const TensorRef& mask_of,
           const TensorRef& masks, const TensorRef& repetition, const TensorRef& seen_ends, const TensorRef& seen_ids,
           const TensorRef& seen_costs, const TensorRef& bias_ends, const TensorRef& bias_ids, const TensorRef& biases,
           const TensorRef& allowed_ends, const TensorRef& allowed_ids, const TensorRef& drawn, const TensorRef& counts,
           const TensorRef& logprobs, const TensorRef& top_ids, const TensorRef& top_logprobs,
           const TensorRef& totals) {
            (sample)(
                ids, logits,
                {rows, temperature, top_k, top_p, min_p, filters, seed, branch, index, mask_of, masks, drawn},
                {repetition, seen_ends, seen_ids, seen_costs, bias_ends, bias_ids, biases, allowed_ends, allowed_ids},
                {counts, logprobs, top_ids, top_logprobs, totals});
        },
        "ids"_a, "logits"_a, py::kw_only(), "rows"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a,
        "branch"_a, "index"_a, "filters"_a = none, "mask_of"_a = none, "masks"_a = none, "repetition"_a = none,
        "seen_ends"_a = none, "seen_ids"_a = none, "seen_costs"_a = none, "bias_ends"_a = none, "bias_ids"_a = none,
        "biases"_a = none, "allowed_ends"_a = none, "allowed_ids"_a = none, "drawn"_a = none, "counts"_a = none,
        "logprobs"_a = none, "top_ids"_a = none, "top_logprobs"_a = none, "totals"_a = none, free);
    module.def(
        "score",
        [](const TensorRef& logits, const TensorRef& targets, const TensorRef& counts, const TensorRef& logprobs,
           const TensorRef& top_ids, const TensorRef& top_logprobs,
           const TensorRef& totals) { (score)(logits, targets, {counts, logprobs, top_ids, top_logprobs, totals}); },
        "logits"_a, "targets"_a, "counts"_a, "logprobs"_a, "top_ids"_a, "top_logprobs"_a, "totals"_a = none, free);
    module.def("copy_blocks", &copy_blocks, "source"_a, "target"_a, "pairs"_a, free);
    module.def("gather_blocks", &gather_blocks, "staging"_a, "arena"_a, "ids"_a, "begin"_a = 0, free);
    module.def("scatter_blocks", &scatter_blocks, "arena"_a, "staging"_a, "ids"_a, "begin"_a = 0, free);
    module.def("checksum_blocks", &checksum_blocks, "sums"_a, "arena"_a, "ids"_a, free);
}
