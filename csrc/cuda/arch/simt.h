// The language that kernels are written in: CUDA C++, or, with OCTAVO_SIMT, the simulator's version of it, which runs
// the same sources on a CPU under AddressSanitizer (tests/csrc/simt).
#pragma once

#ifdef OCTAVO_SIMT
#include "simt/instructions.h"
#include "simt/language.h"
#else
#include "arch/ptx.cuh"
#endif

#include "arch/launch.cuh"
