#include "simt/cuda_runtime.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

namespace octavo::simt {

struct Stream {
    struct Work {
        std::function<bool()> ready;
        std::function<void()> run;
    };
    std::deque<Work> queue;
};
struct Event {
    std::shared_ptr<bool> passed = std::make_shared<bool>(true);  // of its latest record
};

namespace {

struct Device {
    int major, minor, shared_per_block, shared_per_processor;
};
// Those of an A100, an RTX 4090 and an H100; few processors, so that a small case already has blocks with several
// items.
constexpr Device kDevices[] = {
    {8, 0, 163 * 1024, 164 * 1024}, {8, 9, 99 * 1024, 100 * 1024}, {9, 0, 227 * 1024, 228 * 1024}};
constexpr int kProcessors = 2, kMostByRegisters = 3, kWithoutAsking = 48 * 1024, kReserved = 1024;

struct Region {
    std::uintptr_t begin, end;
    cudaPointerAttributes attributes;
};

Device device = kDevices[2];
int current = 2;  // its number
int driver_version = CUDART_VERSION, num_devices = 1;
Stream null_stream;
bool null_held = false, device_lost = false;
std::set<Stream*> streams{&null_stream};
std::map<std::pair<int, const void*>, int> allowed;  // the shared memory that a kernel may have, where it was set
std::vector<Region> regions;
std::string calls;
int failing = -1, alive = 0;
cudaError_t latest = cudaSuccess;

// An error stays until cudaGetLastError takes it away.
cudaError_t left(cudaError_t status) {
    if (device_lost) {
        status = cudaErrorLaunchFailure;
    }
    latest = status == cudaSuccess ? latest : status;
    return status;
}

// Counts a call; whether it is the one to fail.
bool fails(char letter) {
    calls += letter;
    return failing >= 0 && failing-- == 0;
}

// What a call returns that has `letter`.
cudaError_t counted(char letter) { return left(fails(letter) ? cudaErrorMemoryAllocation : cudaSuccess); }

bool always() { return true; }

Stream& of(cudaStream_t stream) { return stream == nullptr ? null_stream : *stream; }

bool step(Stream& stream) {
    if (stream.queue.empty() || !stream.queue.front().ready()) {
        return false;
    }
    const auto run = std::move(stream.queue.front().run);
    stream.queue.pop_front();
    run();
    return true;
}

// Some stream does one thing, or none has anything it can do.
bool progress() {
    std::vector<Stream*> order(streams.begin(), streams.end());
    std::shuffle(order.begin(), order.end(), chance);
    for (Stream* stream : order) {
        if (step(*stream)) {
            return true;
        }
    }
    return false;
}

template <typename Condition>
void run_until(Condition condition) {
    while (!condition()) {
        if (!progress()) {
            die("the host waits for what never comes");
        }
    }
}

}  // namespace

void settle(std::uintptr_t stream) {
    if (stream == 0 && !null_held) {
        synchronize(0);
    }
}
void hold_null_stream(bool held) { null_held = held; }
void synchronize(std::uintptr_t stream) {
    Stream& waited = of(reinterpret_cast<cudaStream_t>(stream));
    run_until([&] { return waited.queue.empty(); });
}
std::uintptr_t make_stream() {
    auto* stream = new Stream;
    streams.insert(stream);
    return reinterpret_cast<std::uintptr_t>(stream);
}
void end_stream(std::uintptr_t stream) {
    synchronize(stream);
    auto* ended = reinterpret_cast<Stream*>(stream);
    streams.erase(ended);
    delete ended;
}

std::string take_calls() { return std::exchange(calls, ""); }
void fail_after(int count) { failing = count; }
void lose_device(bool lost) {
    device_lost = lost;
    latest = lost ? cudaErrorLaunchFailure : cudaSuccess;
}
int last_error() { return latest; }
int choose_device(int which) {
    current = which % static_cast<int>(std::size(kDevices));
    device = kDevices[current];
    return device.shared_per_block;
}
void choose_versions(int major, int minor, int driver, int count) {
    device.major = major;
    device.minor = minor;
    driver_version = driver;
    num_devices = count;
}
int live() { return alive; }
void place_memory(std::uintptr_t begin, std::uintptr_t bytes, int type, int device_id) {
    regions.push_back({begin, begin + bytes, {static_cast<cudaMemoryType>(type), device_id}});
}

cudaError_t enqueue_kernel(const void* kernel, const cudaLaunchConfig_t& config, std::function<void()> work) {
    if (const cudaError_t status = counted(config.stream == nullptr ? 'K' : 'k'); status != cudaSuccess) {
        return status;
    }
    const dim3 &grid = config.gridDim, &block = config.blockDim;
    constexpr unsigned kMostInGrid = 65535, kMostThreads = 1024;
    const auto found = allowed.find({current, kernel});
    const int limit = found == allowed.end() ? kWithoutAsking : std::max(found->second, kWithoutAsking);
    if (grid.x == 0 || grid.x >= 1U << 31 || grid.y == 0 || grid.y > kMostInGrid || grid.z == 0 ||
        grid.z > kMostInGrid || block.x == 0 || block.x > kMostThreads || block.y != 1 || block.z != 1) {
        return left(cudaErrorInvalidConfiguration);
    }
    if (config.dynamicSmemBytes > static_cast<std::size_t>(limit)) {
        return left(cudaErrorInvalidValue);
    }
    of(config.stream).queue.push_back({always, std::move(work)});
    return cudaSuccess;
}

}  // namespace octavo::simt

using namespace octavo::simt;

const char* cudaGetErrorString(cudaError_t status) {
    switch (status) {
        case cudaErrorInvalidValue:
            return "invalid argument";
        case cudaErrorMemoryAllocation:
            return "out of memory";
        case cudaErrorInvalidConfiguration:
            return "invalid configuration argument";
        case cudaErrorLaunchFailure:
            return "unspecified launch failure";
        default:
            return "another error";
    }
}
cudaError_t cudaGetLastError() {
    const cudaError_t status = latest;
    latest = device_lost ? latest : cudaSuccess;
    return status;
}
cudaError_t cudaPeekAtLastError() { return latest; }
cudaError_t cudaGetDevice(int* number) {
    *number = current;
    return left(cudaSuccess);
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = num_devices;
    return left(num_devices ? cudaSuccess : cudaErrorInsufficientDriver);
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int id) {
    if (id < 0 || id >= static_cast<int>(std::size(kDevices))) {
        return left(cudaErrorInvalidDevice);
    }
    switch (attribute) {
        case cudaDevAttrMaxSharedMemoryPerBlock:
            *value = kWithoutAsking;
            break;
        case cudaDevAttrMultiProcessorCount:
            *value = kProcessors;
            break;
        case cudaDevAttrComputeCapabilityMajor:
            *value = device.major;
            break;
        case cudaDevAttrComputeCapabilityMinor:
            *value = device.minor;
            break;
        case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
            *value = device.shared_per_processor;
            break;
        case cudaDevAttrMaxSharedMemoryPerBlockOptin:
            *value = device.shared_per_block;
            break;
    }
    return left(cudaSuccess);
}
cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int bytes) {
    if (const cudaError_t status = counted('a'); status != cudaSuccess) {
        return status;
    }
    if (bytes < 0 || bytes > device.shared_per_block) {
        return left(cudaErrorInvalidValue);
    }
    allowed[{current, kernel}] = bytes;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int threads,
                                                          std::size_t shared_bytes) {
    const int shared = static_cast<int>(shared_bytes) + kReserved;
    *blocks = std::min({kMostByRegisters, 2048 / threads, device.shared_per_processor / shared});
    return left(cudaSuccess);
}
cudaError_t cudaDriverGetVersion(int* version) {
    *version = driver_version;
    return left(cudaSuccess);
}
cudaError_t cudaRuntimeGetVersion(int* version) {
    *version = CUDART_VERSION;
    return left(cudaSuccess);
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    *attributes = {cudaMemoryTypeManaged, 0};
    const auto place = reinterpret_cast<std::uintptr_t>(address);
    for (const Region& region : regions) {
        if (place >= region.begin && place < region.end) {
            *attributes = region.attributes;
        }
    }
    return left(cudaSuccess);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    if (const cudaError_t status = counted('s'); status != cudaSuccess) {
        return status;
    }
    *stream = new Stream;
    streams.insert(*stream);
    ++alive;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (!stream->queue.empty() && !device_lost) {
        die("a stream ends with work in it");
    }
    streams.erase(stream);
    delete stream;
    --alive;
    return left(cudaSuccess);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    if (!device_lost) {
        run_until([&] { return of(stream).queue.empty(); });
    }
    return left(cudaSuccess);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    const cudaError_t status = counted('w');
    if (status == cudaSuccess) {
        of(stream).queue.push_back({[passed = event->passed] { return *passed; }, [] {}});
    }
    return status;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    const cudaError_t status = counted('e');
    if (status == cudaSuccess) {
        *event = new Event;
        ++alive;
    }
    return status;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    --alive;
    return left(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const cudaError_t status = counted('r');
    if (status == cudaSuccess) {
        event->passed = std::make_shared<bool>(false);
        of(stream).queue.push_back({always, [passed = event->passed] { *passed = true; }});
    }
    return status;
}
// "Not ready" is left behind like any other error.
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (chance() % 2 && !device_lost) {
        progress();
    }
    return left(*event->passed ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    if (!device_lost) {
        run_until([&] { return *event->passed; });
    }
    return left(cudaSuccess);
}

cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
    const cudaError_t status = counted('h');
    if (status == cudaSuccess) {
        *memory = std::malloc(bytes);
        ++alive;
    }
    return status;
}
cudaError_t cudaFreeHost(void* memory) {
    std::free(memory);
    --alive;
    return left(cudaSuccess);
}

cudaError_t cudaMemcpyBatchAsync(const void* const* to, const void* const* from, const std::size_t* bytes,
                                 std::size_t count, cudaMemcpyAttributes*, std::size_t*, std::size_t,
                                 cudaStream_t stream) {
    if (const cudaError_t status = counted('b'); status != cudaSuccess) {
        return status;
    }
    calls += std::to_string(count);
    std::vector<std::size_t> order(count);  // of no batch is it known
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::shuffle(order.begin(), order.end(), chance);
    for (const std::size_t i : order) {
        auto* target = const_cast<void*>(to[i]);
        of(stream).queue.push_back(
            {always, [target, source = from[i], size = bytes[i]] { std::memcpy(target, source, size); }});
    }
    return cudaSuccess;
}
