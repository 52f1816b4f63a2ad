#include "octavo/team.h"

#include "bind.h"
#include "tensor.h"

namespace py = pybind11;
using namespace py::literals;

namespace octavo::bind {

void bind_team(py::module_& module) {
    py::class_<Team>(module, "Team", "One rank of a group, in memory that all ranks map, and which this keeps.")
        .def(py::init<const TensorRef&, int, int, double>(), "memory"_a, "rank"_a, "size"_a, "patience_s"_a,
             py::keep_alive<1, 2>())
        .def_property_readonly("rank", &Team::rank)
        .def_property_readonly("size", &Team::size)
        .def("meet", &Team::meet_in_step, py::call_guard<py::gil_scoped_release>(),
             "Waits until all ranks have called it as often. False if the team is broken.")
        .def("break_off", &Team::break_off, "Ends all meetings, now and later.")
        .def_property_readonly("trouble", &Team::trouble, "Why the team is broken; empty if it is not.");
}

}  // namespace octavo::bind
