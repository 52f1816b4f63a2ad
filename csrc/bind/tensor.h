// Converts torch tensors to TensorRef without torch: an object with data_ptr(), shape, stride(), dtype and is_cpu is a
// tensor. None is a tensor that is not given.
#pragma once

#include <pybind11/pybind11.h>

#include "octavo/api.h"

namespace octavo::bind {

TensorRef tensor_ref(pybind11::handle object);

}  // namespace octavo::bind

namespace pybind11::detail {

// Never refuses an object: the op, which knows the argument's name, says what is wrong with it.
template <>
struct type_caster<octavo::TensorRef> {
    PYBIND11_TYPE_CASTER(octavo::TensorRef, const_name("torch.Tensor"));

    bool load(handle source, bool) {
        value = octavo::bind::tensor_ref(source);
        return true;
    }
};

// A KvCache object, or a tensor that has both keys and values.
template <>
struct type_caster<octavo::KvCache> : type_caster_base<octavo::KvCache> {
    bool load(handle source, bool convert) {
        if (type_caster_base<octavo::KvCache>::load(source, convert)) {
            return true;
        }
        joint_.keys = octavo::bind::tensor_ref(source);
        value = &joint_;
        return true;
    }

  private:
    octavo::KvCache joint_;
};

}  // namespace pybind11::detail
