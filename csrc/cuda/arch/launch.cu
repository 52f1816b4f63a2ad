#include <map>
#include <mutex>
#include <tuple>
#include <utility>

#include "arch/simt.h"

namespace octavo::cuda {
namespace {

constexpr std::size_t kWithoutAsking = 48 * 1024;

// What the runtime was told and has said. A device is known by its number: another one has limits of its own.
struct Known {
    std::mutex mutex;
    std::map<std::pair<const void*, int>, std::size_t> allowed;              // kernel, device
    std::map<std::tuple<const void*, int, int, std::size_t>, int> resident;  // and threads, bytes
};

Known& known() {
    static Known all;
    return all;
}

int current_device() {
    int device = 0;
    check(cudaGetDevice(&device), "device");
    return device;
}

}  // namespace

void allow_shared(const void* kernel, std::size_t bytes) {
    if (bytes <= kWithoutAsking) {
        return;
    }
    const int device = current_device();
    const std::lock_guard<std::mutex> lock(known().mutex);
    std::size_t& allowed = known().allowed[{kernel, device}];
    if (bytes > allowed) {
        check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)),
              "shared memory");
        allowed = bytes;
    }
}

int resident_blocks(const void* kernel, int threads, std::size_t shared_bytes) {
    allow_shared(kernel, shared_bytes);
    const int device = current_device();
    const std::lock_guard<std::mutex> lock(known().mutex);
    int& blocks = known().resident[{kernel, device, threads, shared_bytes}];
    if (blocks == 0) {
        int processors = 0, per_processor = 0;
        check(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device), "device");
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, kernel, threads, shared_bytes),
              "occupancy");
        blocks = processors * (per_processor > 0 ? per_processor : 1);
    }
    return blocks;
}

}  // namespace octavo::cuda
