#include "simt/cuda_runtime.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "simt/runtime.h"

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

struct Region {
    std::uintptr_t begin, end;
    cudaPointerAttributes attributes;
};

std::set<Stream*> streams;
std::vector<Region> regions;
std::string calls;
int failing = -1, alive = 0;

// Counts a call; whether it is the one to fail.
bool fails(char letter) {
    calls += letter;
    return failing >= 0 && failing-- == 0;
}

bool always() { return true; }

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

void enqueue(void* stream, std::function<void()> work) {
    if (stream == nullptr) {
        work();
        return;
    }
    calls += 'k';
    static_cast<Stream*>(stream)->queue.push_back({always, std::move(work)});
}

std::string take_calls() { return std::exchange(calls, ""); }
void fail_after(int count) { failing = count; }
int live() { return alive; }
void place_memory(std::uintptr_t begin, std::uintptr_t bytes, int type, int device) {
    regions.push_back({begin, begin + bytes, {static_cast<cudaMemoryType>(type), device}});
}

}  // namespace octavo::simt

using namespace octavo::simt;

const char* cudaGetErrorString(cudaError_t status) {
    return status == cudaErrorLaunchFailure ? "unspecified launch failure" : "another error";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
    *device = 0;
    return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
    *count = 1;
    return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
    *attributes = {cudaMemoryTypeManaged, 0};
    const auto place = reinterpret_cast<std::uintptr_t>(address);
    for (const Region& region : regions) {
        if (place >= region.begin && place < region.end) {
            *attributes = region.attributes;
        }
    }
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    if (fails('s')) {
        return cudaErrorLaunchFailure;
    }
    *stream = new Stream;
    streams.insert(*stream);
    ++alive;
    return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    if (!stream->queue.empty()) {
        die("a stream ends with work in it");
    }
    streams.erase(stream);
    delete stream;
    --alive;
    return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    run_until([&] { return stream->queue.empty(); });
    return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (fails('w')) {
        return cudaErrorLaunchFailure;
    }
    const auto passed = event->passed;
    if (stream == nullptr) {
        run_until([&] { return *passed; });
    } else {
        stream->queue.push_back({[passed] { return *passed; }, [] {}});
    }
    return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
    if (fails('e')) {
        return cudaErrorLaunchFailure;
    }
    *event = new Event;
    ++alive;
    return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    delete event;
    --alive;
    return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    if (fails('r')) {
        return cudaErrorLaunchFailure;
    }
    const auto passed = event->passed = std::make_shared<bool>(stream == nullptr);
    if (stream != nullptr) {
        stream->queue.push_back({always, [passed] { *passed = true; }});
    }
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    if (chance() % 2) {
        progress();
    }
    return *event->passed ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    run_until([&] { return *event->passed; });
    return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
    if (fails('h')) {
        return cudaErrorLaunchFailure;
    }
    *memory = std::malloc(bytes);
    ++alive;
    return cudaSuccess;
}
cudaError_t cudaFreeHost(void* memory) {
    std::free(memory);
    --alive;
    return cudaSuccess;
}

cudaError_t cudaMemcpyBatchAsync(const void* const* to, const void* const* from, const std::size_t* bytes,
                                 std::size_t count, cudaMemcpyAttributes*, std::size_t*, std::size_t,
                                 cudaStream_t stream) {
    if (fails('b')) {
        return cudaErrorLaunchFailure;
    }
    calls += std::to_string(count);
    for (std::size_t i = 0; i < count; ++i) {
        auto* target = const_cast<void*>(to[i]);
        stream->queue.push_back(
            {always, [target, source = from[i], size = bytes[i]] { std::memcpy(target, source, size); }});
    }
    return cudaSuccess;
}
