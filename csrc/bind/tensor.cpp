#include "tensor.h"

#include <string>
#include <unordered_map>

namespace py = pybind11;

namespace octavo::bind {
namespace {

// By the identity of torch.float32 and its like, which live as long as torch does.
const DType* dtype_of(py::handle dtype) {
    static std::unordered_map<PyObject*, DType> known;
    const auto found = known.find(dtype.ptr());
    if (found != known.end()) {
        return &found->second;
    }
    const auto text = py::str(dtype).cast<std::string>();
    for (const DType each : {DType::kF32, DType::kF16, DType::kBF16, DType::kU8, DType::kI8, DType::kI32, DType::kI64,
                             DType::kE4M3, DType::kE5M2}) {
        if (text == std::string("torch.") + name_of(each)) {
            dtype.inc_ref();
            return &known.emplace(dtype.ptr(), each).first->second;
        }
    }
    return nullptr;
}

void look_at(py::handle object, TensorRef& ref) {
    const DType* dtype = dtype_of(object.attr("dtype"));
    const py::tuple shape = object.attr("shape"), stride = object.attr("stride")();
    if (!object.attr("is_cpu").cast<bool>()) {
        ref.problem = "is not on the CPU";
    } else if (dtype == nullptr) {
        ref.problem = "is of a type no op here takes";
    } else if (shape.size() > kMaxDims) {
        ref.problem = "has more than six dimensions";
    } else {
        ref.data = reinterpret_cast<void*>(object.attr("data_ptr")().cast<std::uintptr_t>());
        ref.dtype = *dtype;
        ref.ndim = static_cast<int>(shape.size());
        for (std::size_t i = 0; i < shape.size(); ++i) {
            ref.shape[i] = shape[i].cast<std::int64_t>();
            ref.stride[i] = stride[i].cast<std::int64_t>();
        }
    }
}

}  // namespace

TensorRef tensor_ref(py::handle object) {
    TensorRef ref;
    if (object.is_none()) {
        return ref;
    }
    if (!py::hasattr(object, "data_ptr")) {
        ref.problem = "is not a tensor";
        return ref;
    }
    try {
        look_at(object, ref);
    } catch (const py::error_already_set&) {  // a sparse tensor has no strides
        ref = TensorRef{};
        ref.problem = "has no plain memory";
    }
    return ref;
}

}  // namespace octavo::bind
