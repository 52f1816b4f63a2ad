// What kernels are written in: CUDA C++, or its twin that runs the same sources on a CPU, where they are tested under
// AddressSanitizer without a GPU (OCTAVO_SIMT_SHIM).
#pragma once

#ifdef OCTAVO_SIMT_SHIM
#include "shim/instructions.h"
#include "shim/language.h"
#include "shim/launch.h"
#else
#include "arch/launch.cuh"
#include "arch/ptx.cuh"
#endif
