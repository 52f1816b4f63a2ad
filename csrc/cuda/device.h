// Which devices there are and what they can do, on which device memory lies, and the word in which kernels tell faults.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace octavo::cuda {

int device_count();

// Why the kernels of this build cannot run on a device: it, or the driver, is too old. Empty: they can, or there is no
// driver at all. Asks neither for a context nor for memory of the device.
std::string unsupported(int device);

// Whether the kernels that run on a device multiply numbers of 8 bits (multiply_add_e4m3): those made for 8.9 or later.
bool multiplies_fp8(int device);

// Whether a thread block of the current device may have so many bytes of shared memory.
bool fits_shared(std::size_t bytes);

// Why kernels of the current device cannot use this address; null if they can. The caller adds the argument's name. A
// null address counts as usable, and so does pinned host memory. Only one thread may call it at a time.
const char* device_problem(const void* address);

// The word in which kernels of all devices tell faults. It stays until the process ends.
std::int32_t* fault_word();

// The fault that ended kernels have told, as an argument's name and the problem; null: there is none. A fault is
// returned once. Does not wait.
const char* take_fault();

}  // namespace octavo::cuda
