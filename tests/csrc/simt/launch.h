// The names of arch/launch.cuh.
#pragma once

#include <stdexcept>

#include "simt/cuda_runtime.h"
#include "simt/runtime.h"

namespace octavo::cuda {

using Stream = void*;

class DeviceError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

inline unsigned char* shared_memory() { return simt::self->block->shared; }

template <typename T>
struct Given {
    using Type = T;
};

template <typename... Parameters>
void launch(void (*kernel)(Parameters...), dim3 grid, int threads, std::size_t shared_bytes, Stream stream,
            typename Given<Parameters>::Type... parameters) {
    simt::enqueue(stream, [=] {
        const auto body = [&] { kernel(parameters...); };
        const auto call = [](const void* arguments) { (*static_cast<decltype(body)*>(arguments))(); };
        simt::run_grid(grid, threads, shared_bytes, {call, &body});
    });
}

template <typename... Parameters>
int resident_blocks(void (*)(Parameters...), int, std::size_t) {
    return 6;  // few, so that a small case already has blocks with several items
}

}  // namespace octavo::cuda
