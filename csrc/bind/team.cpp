#include "octavo/team.h"

#include <pybind11/stl.h>

#include "bind.h"
#include "octavo/host_links.h"
#include "tensor.h"

namespace py = pybind11;
using namespace py::literals;

namespace octavo::bind {

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
    py::class_<HostLinks>(module, "HostLinks", "A host's connections to the other hosts of its group, for its rank 0.")
        .def(py::init<Team&, std::vector<int>, int>(), "team"_a, "fds"_a, "host"_a, py::keep_alive<1, 2>())
        .def_property_readonly("num_sent_bytes", &HostLinks::num_sent_bytes);
}

}  // namespace octavo::bind
