#include <pybind11/stl.h>

#include "bind.h"
#include "octavo/api.h"
#include "octavo/sample.h"
#include "tensor.h"

namespace py = pybind11;

namespace octavo {

#include "ops.inl"

}  // namespace octavo
