// The part of CUDA's runtime that launches kernels, swaps blocks and asks about devices, for the simulator. Streams are
// queues whose work is done later; a call that failed leaves its error behind (cuda_runtime.cpp).
#pragma once

#include <cstddef>
#include <functional>

#include "simt/runtime.h"

#define CUDART_VERSION 13000

namespace octavo::simt {
struct Stream;
struct Event;
}  // namespace octavo::simt

using cudaStream_t = octavo::simt::Stream*;
using cudaEvent_t = octavo::simt::Event*;

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInvalidConfiguration = 9,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101,
    cudaErrorNotReady = 600,
    cudaErrorLaunchFailure = 719
};
constexpr unsigned cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2, cudaHostAllocDefault = 0,
                   cudaHostAllocPortable = 1;
enum cudaMemcpySrcAccessOrder { cudaMemcpySrcAccessOrderStream = 1 };
enum cudaMemcpyFlags { cudaMemcpyFlagPreferOverlapWithCompute = 1 };
struct cudaMemcpyAttributes {
    cudaMemcpySrcAccessOrder srcAccessOrder;
    unsigned flags;
};
enum cudaMemoryType {
    cudaMemoryTypeUnregistered = 0,
    cudaMemoryTypeHost = 1,
    cudaMemoryTypeDevice = 2,
    cudaMemoryTypeManaged = 3
};
struct cudaPointerAttributes {
    cudaMemoryType type;
    int device;
};
enum cudaDeviceAttr {
    cudaDevAttrMaxSharedMemoryPerBlock = 8,
    cudaDevAttrMultiProcessorCount = 16,
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerMultiprocessor = 81,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
struct cudaLaunchAttribute;
struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    std::size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute* attrs;
    unsigned numAttrs;
};

const char* cudaGetErrorString(cudaError_t status);
cudaError_t cudaGetLastError();
cudaError_t cudaPeekAtLastError();
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaRuntimeGetVersion(int* version);
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address);
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags);
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags);
cudaError_t cudaEventDestroy(cudaEvent_t event);
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream);
cudaError_t cudaEventQuery(cudaEvent_t event);
cudaError_t cudaEventSynchronize(cudaEvent_t event);
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags);
cudaError_t cudaFreeHost(void* memory);
cudaError_t cudaMemcpyBatchAsync(const void* const* to, const void* const* from, const std::size_t* bytes,
                                 std::size_t count, cudaMemcpyAttributes* attributes, std::size_t* first,
                                 std::size_t num_attributes, cudaStream_t stream);

namespace octavo::simt {

cudaError_t enqueue_kernel(const void* kernel, const cudaLaunchConfig_t& config, std::function<void()> work);

}  // namespace octavo::simt

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute attribute, int value);
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads,
                                                          std::size_t shared_bytes);
// The arguments are copied now; the kernel runs later.
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
    return [&](Parameters... copies) {
        return octavo::simt::enqueue_kernel(reinterpret_cast<const void*>(kernel), *config, [=, c = *config] {
            const auto body = [&] { kernel(copies...); };
            const auto call = [](const void* given) { (*static_cast<decltype(body)*>(given))(); };
            const auto threads = static_cast<int>(c.blockDim.x);
            octavo::simt::run_grid(c.gridDim, threads, c.dynamicSmemBytes, {call, &body});
        });
    }(static_cast<Arguments&&>(arguments)...);
}
