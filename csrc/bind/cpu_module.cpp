// gpu_worker._C_cpu: the CPU half of the extension. Only gpu_worker/ops/native.py imports it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind.h"
#include "cpu/kernels.h"
#include "octavo/isa.h"
#include "octavo/pool.h"
#include "octavo/tensor.h"

namespace py = pybind11;

#if defined(__clang__)
#define OCTAVO_COMPILER "clang " __clang_version__
#else
#define OCTAVO_COMPILER "gcc " __VERSION__
#endif

namespace {

py::dict build_info() {
    py::dict info;
    info["version"] = OCTAVO_VERSION;
    info["compiler"] = OCTAVO_COMPILER;
    info["build_type"] = OCTAVO_BUILD_TYPE;
    info["sanitizers"] = OCTAVO_SANITIZERS;
    info["isa"] = octavo::isa_name(octavo::kernels().isa);
    info["cpu_features"] = octavo::cpu_features();
    return info;
}

}  // namespace

PYBIND11_MODULE(_C_cpu, module) {
    module.doc() = "octavo's native CPU code";
    module.attr("bindings") = OCTAVO_BINDINGS;
    module.def("version", [] { return OCTAVO_VERSION; }, "The version of octavo this was built from.");
    module.def(
        "isa", [] { return octavo::isa_name(octavo::kernels().isa); }, "The instruction set in use, one of isas().");
    module.def(
        "isas",
        [] {
            std::vector<std::string> names;
            for (const octavo::Isa isa : octavo::usable_isas()) {
                names.emplace_back(octavo::isa_name(isa));
            }
            return names;
        },
        "What select_isa takes: what was built and this machine runs. emulated, for tests alone, has AMX's tiles "
        "written "
        "out.");
    module.def(
        "best_isa", [] { return octavo::isa_name(octavo::best_isa()); },
        "The best one this machine runs, built or not.");
    module.def("build_info", &build_info, "How and for what this was built, as `octavo doctor` prints it.");
    module.def(
        "select_isa", [](const std::string& name) { octavo::select_isa(name.c_str()); }, py::arg("name"),
        "Makes ops use a lesser instruction set, for comparisons.");
    module.def(
        "set_threads",
        [](int count) {
            octavo::require(count >= 0 && count <= 1024, "count", "is not between 0 and 1024");
            octavo::Pool::instance().resize(count);
        },
        py::arg("count"), py::call_guard<py::gil_scoped_release>(),
        "Threads of all ops; 0: one per core this process may use.");
    module.def("threads", [] { return octavo::Pool::instance().size(); }, py::call_guard<py::gil_scoped_release>());
    py::register_local_exception<octavo::ArgumentError>(module, "ArgumentError", PyExc_ValueError);
    octavo::bind::bind_cache(module);
    octavo::bind::bind_weights(module);
    octavo::bind_ops(module);
    auto reference = module.def_submodule("ref", "The same ops in double precision, slowly: what they mean.");
    octavo::ref::bind_ops(reference);
    octavo::bind::bind_team(module);
    octavo::bind::bind_llama(module);
    octavo::bind::bind_layer_program(module);
    auto sums = module.def_submodule("part_sum", "The checksum of a block that travels in parts.");
    octavo::bind::bind_part_sum(sums);
    auto inside = module.def_submodule("inside", "Functions for tests alone.");
    octavo::bind::bind_attention_plan(inside);
    inside.def(
        "agree",
        [](const std::string& one, const std::string& other) {
            return octavo::agree(octavo::kernels_named(one.c_str()), octavo::kernels_named(other.c_str()));
        },
        py::arg("one"), py::arg("other"));
}
