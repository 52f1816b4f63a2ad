// What kernels are written in: CUDA C++, or on a CPU the shim that runs the same sources (OCTAVO_SIMT_SHIM).
#pragma once

#ifdef OCTAVO_SIMT_SHIM
#include "arch/simt_shim.h"
#else
#include "arch/launch.cuh"
#include "arch/ptx.cuh"
#endif
