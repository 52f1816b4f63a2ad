// torch tensors as TensorRef, without torch: what has data_ptr(), shape, stride(), dtype and is_cpu. None is no tensor.
#pragma once

#include <pybind11/pybind11.h>

#include "octavo/tensor.h"

namespace octavo::bind {

TensorRef tensor_ref(pybind11::handle object);

}  // namespace octavo::bind

namespace pybind11::detail {

// Never refuses: what is wrong with an object is said by the op, which knows the argument's name.
template <>
struct type_caster<octavo::TensorRef> {
    PYBIND11_TYPE_CASTER(octavo::TensorRef, const_name("torch.Tensor"));

    bool load(handle source, bool) {
        value = octavo::bind::tensor_ref(source);
        return true;
    }
};

}  // namespace pybind11::detail
