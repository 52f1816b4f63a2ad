#include "octavo/weight.h"

#include <pybind11/stl.h>

#include "bind.h"
#include "tensor.h"

namespace py = pybind11;
using namespace py::literals;

namespace octavo::bind {

void bind_weights(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> free;
    py::class_<Weight>(module, "Weight", "A matrix inputs are multiplied with; refers to the memory of `data`.")
        .def(py::init([](const TensorRef& data, const std::string& format, std::int64_t rows, std::int64_t cols,
                         const std::string& inputs) {
                 const Format found = format_named(format.c_str());
                 return make_weight(data, found, rows, cols, rounding_named(inputs.c_str(), found));
             }),
             "data"_a, "format"_a, "rows"_a, "cols"_a, "inputs"_a = "", py::keep_alive<1, 2>())
        .def_readonly("rows", &Weight::rows)
        .def_readonly("cols", &Weight::cols)
        .def_property_readonly("inputs", [](const Weight& weight) { return name_of(weight.rounding); })
        .def_property_readonly("format", [](const Weight& weight) { return name_of(weight.format); });
    module.def(
        "packed_bytes",
        [](const std::string& format, std::int64_t rows, std::int64_t cols) {
            return packed_bytes(format_named(format.c_str()), rows, cols);
        },
        "format"_a, "rows"_a, "cols"_a);
    module.def(
        "repack",
        [](const TensorRef& packed, const TensorRef& gguf, const std::string& format, std::int64_t rows,
           std::int64_t cols) { repack(packed, gguf, format_named(format.c_str()), rows, cols); },
        "packed"_a, "gguf"_a, "format"_a, "rows"_a, "cols"_a, free);
    module.def("pack", &pack, "packed"_a, "values"_a, free);
    module.def(
        "quantize",
        [](const TensorRef& packed, const TensorRef& values, const std::string& format) {
            quantize(packed, values, format_named(format.c_str()));
        },
        "packed"_a, "values"_a, "format"_a, free);
}

}  // namespace octavo::bind
