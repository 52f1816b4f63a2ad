// Launches kernels, and says what a launch needs to know about the device. The simulator runs this file, too.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace octavo::cuda {

using Stream = cudaStream_t;

class DeviceError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

inline void check(cudaError_t status, const char* what) {
    if (status != cudaSuccess) {
        cudaGetLastError();  // it is told here: no later call, of whoever, must find it
        throw DeviceError(std::string(what) + ": " + cudaGetErrorString(status));
    }
}

// What follows is asked of the runtime once for each kernel and device, not at each launch (launch.cu).

// Lets a kernel have so much shared memory on the current device.
void allow_shared(const void* kernel, std::size_t bytes);
int resident_blocks(const void* kernel, int threads, std::size_t shared_bytes);

// Keeps arguments out of deducing Parameters: they convert to what the kernel takes.
template <typename T>
struct Given {
    using Type = T;
};

template <typename... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared_bytes, Stream stream,
            typename Given<Parameters>::Type... parameters) {
    allow_shared(reinterpret_cast<const void*>(kernel), shared_bytes);
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    check(cudaLaunchKernelEx(&config, kernel, parameters...), "launch");
}

// How many blocks of this shape the current device runs at once.
template <typename... Parameters>
int resident_blocks(void (*kernel)(Parameters...), int threads, std::size_t shared_bytes) {
    return resident_blocks(reinterpret_cast<const void*>(kernel), threads, shared_bytes);
}

}  // namespace octavo::cuda
