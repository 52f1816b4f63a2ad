#pragma once

#include <pybind11/pybind11.h>

namespace octavo {

void bind_ops(pybind11::module_& module);

namespace ref {
void bind_ops(pybind11::module_& module);
}

}  // namespace octavo

namespace octavo::bind {

void bind_weights(pybind11::module_& module);
void bind_llama(pybind11::module_& module);

}  // namespace octavo::bind
