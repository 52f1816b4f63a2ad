#include "ref/ref.h"

#include <pybind11/stl.h>

#include "bind.h"
#include "octavo/sample.h"
#include "tensor.h"

namespace py = pybind11;

namespace octavo::ref {

#include "ops.inl"

}  // namespace octavo::ref
