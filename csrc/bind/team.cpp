#include "octavo/team.h"

#include <pybind11/stl.h>

#include "bind.h"
#include "kv.h"
#include "octavo/group_hosts.h"
#include "tensor.h"

namespace py = pybind11;
using namespace py::literals;

namespace octavo::bind {
namespace {

using Free = py::call_guard<py::gil_scoped_release>;

// An array of an order, in its memory.
template <typename T>
py::memoryview view(const TensorRef& array) {
    std::vector<py::ssize_t> shape(array.shape, array.shape + array.ndim), strides;
    for (int i = 0; i < array.ndim; ++i) {
        strides.push_back(static_cast<py::ssize_t>(array.stride[i] * static_cast<std::int64_t>(sizeof(T))));
    }
    return py::memoryview::from_buffer(array.as<T>(), shape, strides);
}

void bind_order(py::module_& module) {
    py::class_<TeamOrder>(module, "TeamOrder",
                          "What the front wants of all ranks, at the beginning of the team's room.")
        .def(py::init<const Team&, std::int64_t, std::int64_t>(), "team"_a, "tokens"_a, "plan_bytes"_a,
             py::keep_alive<1, 2>())
        .def_static("room_bytes", &TeamOrder::room_bytes, "plan_bytes"_a, "How much of the room it takes.")
        .def_property_readonly("wants_logits", [](const TeamOrder& order) { return order.order() == Order::kLogits; })
        .def_property_readonly("num_rows", &TeamOrder::rows, "Of an order of logits.")
        .def("order_logits", &TeamOrder::order_logits, "num_rows"_a)
        .def(
            "order_forward",
            [](TeamOrder& order, const TensorRef& token_ids, const TensorRef& positions, const TensorRef& slots,
               const TensorRef& rows, const TensorRef& cu_q, const TensorRef& seq_lens, const TensorRef& block_tables) {
                order.order_forward({token_ids, positions, slots, {cu_q, seq_lens, block_tables}, rows, {}, {}});
            },
            "token_ids"_a, "positions"_a, "slots"_a, "rows"_a, "cu_q"_a, "seq_lens"_a, "block_tables"_a)
        .def(
            "arrays",
            [](const TeamOrder& order) {
                require(order.order() == Order::kForward, "order", "is not that of a step");
                const TeamStep step = order.step();
                return py::make_tuple(view<std::int64_t>(step.token_ids), view<std::int64_t>(step.positions),
                                      view<std::int64_t>(step.slots), view<std::int64_t>(step.rows),
                                      view<std::int32_t>(step.batch.cu_q), view<std::int32_t>(step.batch.seq_lens),
                                      view<std::int32_t>(step.batch.tables));
            },
            "Those of a step, in the order of order_forward and in the memory of the team.");
    module.attr("ORDER_ROWS") = TeamOrder::kRows;  // of logits, at once
}

void bind_hosts(py::module_& module) {
    py::class_<WantedLogits>(module, "WantedLogits", "What the front wants of rows of logits; by default all.")
        .def(
            py::init([](std::int64_t num_rows, std::int64_t vocabulary, const TensorRef& drawn, const TensorRef& totals,
                        const TensorRef& rows, const TensorRef& temperature, const TensorRef& top_k,
                        const TensorRef& top_p, const TensorRef& min_p, const TensorRef& seed, const TensorRef& branch,
                        const TensorRef& index, const TensorRef& filters, const TensorRef& mask_of,
                        const TensorRef& masks, const TensorRef& repetition, const TensorRef& seen_ends,
                        const TensorRef& seen_ids, const TensorRef& seen_costs, const TensorRef& bias_ends,
                        const TensorRef& bias_ids, const TensorRef& biases, const TensorRef& allowed_ends,
                        const TensorRef& allowed_ids, const TensorRef& counts, const TensorRef& targets) {
                return WantedLogits(
                    num_rows, vocabulary,
                    {rows, temperature, top_k, top_p, min_p, filters, seed, branch, index, mask_of, masks, {}},
                    {repetition, seen_ends, seen_ids, seen_costs, bias_ends, bias_ids, biases, allowed_ends,
                     allowed_ids},
                    counts, targets, drawn, totals);
            }),
            "num_rows"_a, "vocabulary"_a, "drawn"_a, "totals"_a, py::kw_only(), "rows"_a, "temperature"_a, "top_k"_a,
            "top_p"_a, "min_p"_a, "seed"_a, "branch"_a, "index"_a, "filters"_a = py::none(), "mask_of"_a = py::none(),
            "masks"_a = py::none(), "repetition"_a = py::none(), "seen_ends"_a = py::none(), "seen_ids"_a = py::none(),
            "seen_costs"_a = py::none(), "bias_ends"_a = py::none(), "bias_ids"_a = py::none(), "biases"_a = py::none(),
            "allowed_ends"_a = py::none(), "allowed_ids"_a = py::none(), "counts"_a = py::none(),
            "targets"_a = py::none(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(),
            "What `sample` looks at, with what that is given, or `score` (of its targets). What either is to be given "
            "as drawn and totals is written.")
        .def("rows", &WantedLogits::rows, "first"_a, "count"_a, py::keep_alive<0, 1>());
    py::class_<GroupHosts>(module, "GroupHosts", "The hosts of a group, to which the first rank of each speaks.")
        .def(py::init([](Team& team, std::vector<int> fds, int host, const Pairs& kv_heads, const Pairs& layers) {
                 return new GroupHosts(team, std::move(fds), host, bind::spans_of(kv_heads), bind::spans_of(layers));
             }),
             "team"_a, "fds"_a, "host"_a, "kv_heads"_a, "layers"_a, py::keep_alive<1, 2>())
        .def_property_readonly("speaks", &GroupHosts::speaks)
        .def_property_readonly("peers", &GroupHosts::peers, "How many hosts have the layers of this one.")
        .def_property_readonly("before", &GroupHosts::before, "Who has the layers before those of this host; or -1.")
        .def_property_readonly("after", &GroupHosts::after)
        .def("tell", &GroupHosts::tell, "order"_a, "hidden"_a, "wanted"_a = WantedLogits(), Free(),
             "In the front: to all others. False if the team is broken, as of all the others.")
        .def("hear", &GroupHosts::hear, "order"_a, "hidden"_a, "arena"_a, Free(),
             "In other hosts: the next order, and blocks that come before it.")
        .def("mirror", &GroupHosts::mirror, "arena"_a, "ids"_a, Free(), "In the front: blocks, as they are now.")
        .def(
            "exchange",
            [](GroupHosts& hosts, const TensorRef& columns, const Pairs& spans) {
                return hosts.exchange(columns, bind::spans_of(spans));
            },
            "columns"_a, "spans"_a, Free(), "Own columns go to the hosts with the same layers, and theirs come.")
        .def(
            "collect",
            [](GroupHosts& hosts, const TensorRef& columns, const Pairs& spans) {
                return hosts.collect(columns, bind::spans_of(spans));
            },
            "columns"_a, "spans"_a, Free(), "The front gets what it wanted of the columns of all others.")
        .def("send_states", &GroupHosts::send_states, "states"_a, Free())
        .def("receive_states", &GroupHosts::receive_states, "states"_a, Free())
        .def(
            "end_step",
            [](GroupHosts& hosts, const TeamOrder& order, std::int64_t parts, const Kv& kv, const TensorRef& states) {
                return hosts.end_step(order, parts, kv.layers, states);
            },
            "order"_a, "parts"_a, "kv"_a, "states"_a, Free(), "After all parts: the front gets what was computed.");
}

}  // namespace

void bind_team(py::module_& module) {
    py::class_<Team>(module, "Team", "One rank of a group, in memory that all ranks map, and which this keeps.")
        .def(py::init<const TensorRef&, int, int, double, int>(), "memory"_a, "rank"_a, "size"_a, "patience_s"_a,
             "stages"_a = 1, py::keep_alive<1, 2>())
        .def_property_readonly("rank", &Team::rank)
        .def_property_readonly("size", &Team::size)
        .def_property_readonly("stage", &Team::stage)
        .def_property_readonly("rank_in_stage", &Team::rank_in_stage)
        .def_property_readonly("broken", &Team::broken)
        .def("meet", &Team::meet_in_step, py::call_guard<py::gil_scoped_release>(),
             "Waits until all ranks of the stage have called it as often. False if the team is broken.")
        .def("meet_all", &Team::meet_all, py::call_guard<py::gil_scoped_release>(), "The same, of all ranks.")
        .def("meet_for_orders", &Team::meet_for_orders, py::call_guard<py::gil_scoped_release>(),
             "The same meeting, waited for without end.")
        .def("pass_on", &Team::pass_on, "In the first rank of a stage: one part more of a step is done.")
        .def("wait_for_part", &Team::wait_for_part, py::call_guard<py::gil_scoped_release>(),
             "Waits until the stage before this one has passed on as many parts as this was called for.")
        .def("wait_for_end", &Team::wait_for_end, "later"_a = 0, py::call_guard<py::gil_scoped_release>(),
             "In rank 0: waits until the last stage has done as many parts as this stage, but for the `later` last "
             "ones.")
        .def(
            "break_off", [](Team& team) { team.break_off(); }, "Ends all meetings, now and later.")
        .def("waited_s", &Team::waited_s, "rank"_a, "How long a rank has waited for others within steps.")
        .def_property_readonly("trouble", &Team::trouble, "Why the team is broken; empty if it is not.");
    module.attr("TEAM_BYTES") = Team::kControlBytes;  // in front of the room, for all ranks
    bind_order(module);
    bind_hosts(module);
}

}  // namespace octavo::bind
