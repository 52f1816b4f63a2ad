// What kernels are written in: CUDA C++, or its twin that runs the same sources on a CPU, where they are tested under
// AddressSanitizer without a GPU (tests/csrc/simt, OCTAVO_SIMT).
#pragma once

#ifdef OCTAVO_SIMT
#include "simt/instructions.h"
#include "simt/language.h"
#include "simt/launch.h"
#else
#include "arch/launch.cuh"
#include "arch/ptx.cuh"
#endif
