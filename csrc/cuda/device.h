// What there is, and where memory lies.
#pragma once

#include <cstdint>

namespace octavo::cuda {

int device_count();

// Why kernels of the current device cannot use this address, to be said with an argument's name; null if they can
// (nothing, too: it has no address). Pinned host memory they can read and write. For one thread at a time.
const char* device_problem(const void* address);

// The word that kernels of all devices tell their faults in, for as long as the process runs.
std::int32_t* fault_word();

// What kernels that have ended found wrong, once: an argument's name and the problem; null: nothing. Does not wait.
const char* take_fault();

}  // namespace octavo::cuda
