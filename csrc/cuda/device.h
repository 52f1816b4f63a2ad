// What there is, and where memory lies.
#pragma once

namespace octavo::cuda {

int device_count();

// Why kernels of the current device cannot use this address, to be said with an argument's name; null if they can
// (nothing, too: it has no address). Pinned host memory they can read and write. For one thread at a time.
const char* device_problem(const void* address);

}  // namespace octavo::cuda
