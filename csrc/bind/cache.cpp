#include "bind.h"
#include "octavo/api.h"
#include "octavo/check.h"
#include "tensor.h"

namespace py = pybind11;
using namespace py::literals;

namespace octavo::bind {

BlockSparse block_sparse(const std::vector<std::int64_t>& given) {
    if (given.empty()) {
        return {};
    }
    require(given.size() == 5, "sparse", "does not have five numbers");
    return {given[0], given[1], given[2], given[3], given[4]};
}

void bind_cache(py::module_& module) {
    py::class_<KvCache>(module, "KvCache", "Keys and values of a layer; refers to their memory.")
        .def(py::init([](const TensorRef& keys, const TensorRef& values, std::string type, const TensorRef& key_scale,
                         const TensorRef& value_scale) {
                 KvCache kv{keys, values, std::move(type), key_scale, value_scale};
                 check::kv_cache(kv);
                 return kv;
             }),
             "keys"_a, "values"_a = py::none(), "type"_a = "auto", "key_scale"_a = py::none(),
             "value_scale"_a = py::none(), py::keep_alive<1, 2>(), py::keep_alive<1, 3>(), py::keep_alive<1, 5>(),
             py::keep_alive<1, 6>());
    module.def("populate_blocks", &populate_blocks, "arena"_a, "first"_a, "end"_a,
               py::call_guard<py::gil_scoped_release>());
}

}  // namespace octavo::bind
