// The one file that speaks to the copy engines; the shim does not run it.
#include "swap.h"

#include <map>

#include "arch/launch.cuh"
#include "plan/attention_plan.h"

namespace octavo::cuda {
namespace {

// The form of blocks, checked as the kernels' host side does.
struct Side {
    unsigned char* data;
    std::int64_t layer, block, length, layers, blocks;
};

Side side_of(const TensorRef& t, const char* name) {
    require(t.ndim >= 3, name, "has less than three dimensions");
    std::int64_t run = 1;
    for (int i = t.ndim - 1; i >= 2; --i) {
        require(t.shape[i] == 1 || t.stride[i] == run, name, "has blocks that are not contiguous");
        run *= t.shape[i];
    }
    const std::int64_t size = size_of(t.dtype);
    return {t.as<unsigned char>(), t.stride[0] * size, t.stride[1] * size, run * size, t.shape[0], t.shape[1]};
}

struct Copies {
    std::vector<void*> to;
    std::vector<void*> from;
    std::vector<std::size_t> sizes;
};

// Runs of neighbours where blocks of a layer are neighbours in memory; else every block alone.
Copies list_copies(const Side& from, const Side& to, const std::vector<plan::Run>& runs) {
    Copies copies;
    const bool dense = from.block == from.length && to.block == to.length;
    for (std::int64_t layer = 0; layer < from.layers; ++layer) {
        for (const plan::Run& run : runs) {
            const std::int64_t pieces = dense ? 1 : run.blocks, length = dense ? run.blocks * from.length : from.length;
            for (std::int64_t i = 0; i < pieces; ++i) {
                copies.from.push_back(from.data + layer * from.layer + (run.from + i) * from.block);
                copies.to.push_back(to.data + layer * to.layer + (run.to + i) * to.block);
                copies.sizes.push_back(static_cast<std::size_t>(length));
            }
        }
    }
    return copies;
}

void copy_all(Copies& copies, cudaStream_t stream) {
#if CUDART_VERSION >= 13000
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;  // the source may still be written by what is queued
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
    check(cudaMemcpyBatchAsync(const_cast<const void**>(copies.to.data()), const_cast<const void**>(copies.from.data()),
                               copies.sizes.data(), copies.sizes.size(), &attributes, &first, 1, stream),
          "swap");
#else
    for (std::size_t i = 0; i < copies.sizes.size(); ++i) {
        check(cudaMemcpyAsync(copies.to[i], copies.from[i], copies.sizes[i], cudaMemcpyDefault, stream), "swap");
    }
#endif
}

}  // namespace

struct Swapper::State {
    cudaStream_t stream = nullptr;
    cudaEvent_t begin = nullptr;
    std::map<std::int64_t, cudaEvent_t> events;   // of tickets not yet known to be done
    std::map<std::int64_t, std::int64_t*> pairs;  // pinned, read by the copying kernel
    std::int64_t next = 0;

    void forget(std::int64_t ticket) {
        const auto event = events.find(ticket);
        if (event != events.end()) {
            cudaEventDestroy(event->second);
            events.erase(event);
        }
        const auto list = pairs.find(ticket);
        if (list != pairs.end()) {
            cudaFreeHost(list->second);
            pairs.erase(list);
        }
    }
};

Swapper::Swapper() : state_(new State) {
    check(cudaStreamCreateWithFlags(&state_->stream, cudaStreamNonBlocking), "swap stream");
    check(cudaEventCreateWithFlags(&state_->begin, cudaEventDisableTiming), "swap event");
}

Swapper::~Swapper() {
    cudaStreamSynchronize(state_->stream);
    while (!state_->events.empty()) {
        state_->forget(state_->events.begin()->first);
    }
    cudaEventDestroy(state_->begin);
    cudaStreamDestroy(state_->stream);
}

std::int64_t Swapper::start(const TensorRef& source, const TensorRef& target,
                            const std::vector<std::pair<std::int64_t, std::int64_t>>& pairs, StreamHandle after,
                            std::int64_t small_run) {
    const Side from = side_of(source, "source"), to = side_of(target, "target");
    require(from.length == to.length && from.layers == to.layers, "target", "has another form than source");
    std::vector<std::int64_t> froms, tos;
    for (const auto& [a, b] : pairs) {
        require(a >= 0 && a < from.blocks, "pairs", "name a block that source does not have");
        require(b >= 0 && b < to.blocks, "pairs", "name a block that target does not have");
        froms.push_back(a);
        tos.push_back(b);
    }
    const std::int64_t ticket = state_->next++;
    check(cudaEventRecord(state_->begin, static_cast<cudaStream_t>(after)), "swap");
    check(cudaStreamWaitEvent(state_->stream, state_->begin, 0), "swap");
    Copies copies = list_copies(from, to, plan::coalesce(froms, tos));
    const auto total = static_cast<std::int64_t>(pairs.size()) * from.length * from.layers;
    const auto count = static_cast<std::int64_t>(copies.sizes.size());
    if (count >= 16 && total / count < small_run) {
        std::int64_t* list = nullptr;
        check(cudaHostAlloc(reinterpret_cast<void**>(&list), 16 * pairs.size(), cudaHostAllocDefault), "swap");
        state_->pairs[ticket] = list;
        for (std::size_t i = 0; i < pairs.size(); ++i) {
            list[2 * i] = froms[i];
            list[2 * i + 1] = tos[i];
        }
        TensorRef device_pairs;
        device_pairs.data = list;
        device_pairs.ndim = 2;
        device_pairs.shape[0] = static_cast<std::int64_t>(pairs.size());
        device_pairs.shape[1] = 2;
        device_pairs.stride[0] = 2;
        device_pairs.stride[1] = 1;
        device_pairs.dtype = DType::kI64;
        copy_blocks_between(source, target, device_pairs, 8, state_->stream);  // few: decoding keeps the others
    } else if (count > 0) {
        copy_all(copies, state_->stream);
    }
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "swap event");
    state_->events[ticket] = event;
    check(cudaEventRecord(event, state_->stream), "swap");
    return ticket;
}

bool Swapper::done(std::int64_t ticket) {
    const auto event = state_->events.find(ticket);
    if (event == state_->events.end()) {
        return true;
    }
    const cudaError_t status = cudaEventQuery(event->second);
    if (status == cudaErrorNotReady) {
        return false;
    }
    check(status, "swap");
    state_->forget(ticket);
    return true;
}

void Swapper::let_wait(std::int64_t ticket, StreamHandle stream) {
    const auto event = state_->events.find(ticket);
    if (event != state_->events.end()) {
        check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), event->second, 0), "swap");
    }
}

void Swapper::wait(std::int64_t ticket) {
    const auto event = state_->events.find(ticket);
    if (event != state_->events.end()) {
        check(cudaEventSynchronize(event->second), "swap");
        state_->forget(ticket);
    }
}

int device_count() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice) {
        return 0;
    }
    check(status, "devices");
    return count;
}

}  // namespace octavo::cuda
