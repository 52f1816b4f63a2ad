// The one file that calls the copy engines. plan/swap_plan.cpp decides what is copied, and how.
#include "swap.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <set>
#include <type_traits>

#include "arch/simt.h"
#include "common/arena.h"
#include "plan/swap_plan.h"

namespace octavo::cuda {
namespace {

void check(cudaError_t status) {
    if (status != cudaSuccess) {
        throw DeviceError(std::string("swap: ") + cudaGetErrorString(status));
    }
}

template <auto kFree>
struct Free {
    template <typename T>
    void operator()(T* p) const {
        kFree(p);  // a failure here was told by a call before
    }
};
using Event = std::unique_ptr<std::remove_pointer_t<cudaEvent_t>, Free<cudaEventDestroy>>;
using CopyStream = std::unique_ptr<std::remove_pointer_t<cudaStream_t>, Free<cudaStreamDestroy>>;
using PinnedPairs = std::unique_ptr<std::int64_t, Free<cudaFreeHost>>;

Event make_event() {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return Event(event);
}

CopyStream make_stream() {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return CopyStream(stream);
}

void check_pairs(const std::vector<std::pair<std::int64_t, std::int64_t>>& pairs, const Arena& from, const Arena& to) {
    std::set<std::int64_t> sources, targets;
    for (const auto& [source, target] : pairs) {
        require(source >= 0 && source < from.num_blocks, "pairs", "name a block that source does not have");
        require(target >= 0 && target < to.num_blocks, "pairs", "name a block that target does not have");
        require(targets.insert(target).second, "pairs", "write a block twice");
        sources.insert(source);
    }
    for (const std::int64_t target : targets) {
        require(from.data != to.data || sources.count(target) == 0, "pairs", "read and write one block");
    }
}

void copy_by_engine(const Arena& from, const Arena& to, const std::vector<plan::Copy>& copies, cudaStream_t stream) {
    std::vector<const void*> sources;
    std::vector<void*> targets;
    std::vector<std::size_t> sizes;
    for (const plan::Copy& copy : copies) {
        sources.push_back(from.data + copy.from);
        targets.push_back(to.data + copy.to);
        sizes.push_back(static_cast<std::size_t>(copy.bytes));
    }
#if CUDART_VERSION >= 13000
    cudaMemcpyAttributes attributes{};
    attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;  // the source may still be written by what is queued
    attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
    std::size_t first = 0;
    check(cudaMemcpyBatchAsync(const_cast<const void**>(targets.data()), sources.data(), sizes.data(), sizes.size(),
                               &attributes, &first, 1, stream));
#else
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        check(cudaMemcpyAsync(targets[i], sources[i], sizes[i], cudaMemcpyDefault, stream));
    }
#endif
}

// Few thread blocks, so that decoding keeps the others. The pairs must outlive the copy.
PinnedPairs copy_by_kernel(const TensorRef& source, const TensorRef& target, const plan::SwapPlan& plan,
                           cudaStream_t stream) {
    constexpr int kCopyingBlocks = 8;
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, 16 * plan.pairs.size(), cudaHostAllocDefault));
    PinnedPairs list(static_cast<std::int64_t*>(memory));
    std::int64_t* next = list.get();
    for (const auto& [from, to] : plan.pairs) {
        *next++ = from;
        *next++ = to;
    }
    TensorRef pairs;
    pairs.data = list.get();
    pairs.dtype = DType::kI64;
    pairs.ndim = 2;
    pairs.shape[0] = static_cast<std::int64_t>(plan.pairs.size());
    pairs.shape[1] = pairs.stride[0] = 2;
    pairs.stride[1] = 1;
    copy_blocks(source, target, pairs, kCopyingBlocks, stream);
    return list;
}

}  // namespace

struct Swapper::State {
    // A swap that is not yet known to be done: what is to be kept until then.
    struct Swap {
        PinnedPairs pairs;
        Event event;
    };

    std::mutex mutex;
    CopyStream stream = make_stream();
    Event begin = make_event();
    std::map<std::int64_t, std::shared_ptr<Swap>> swaps;  // by ticket
    std::int64_t next = 0;

    std::shared_ptr<Swap> find(std::int64_t ticket) {
        const std::lock_guard<std::mutex> lock(mutex);
        require(ticket >= 0 && ticket < next, "ticket", "was never given out");
        const auto found = swaps.find(ticket);
        return found == swaps.end() ? nullptr : found->second;
    }
    void forget(std::int64_t ticket) {
        const std::lock_guard<std::mutex> lock(mutex);
        swaps.erase(ticket);
    }
    // Tickets whose callers never ask again must not pile up. Swaps end in order.
    void forget_done() {
        while (!swaps.empty() && cudaEventQuery(swaps.begin()->second->event.get()) == cudaSuccess) {
            swaps.erase(swaps.begin());
        }
    }
};

Swapper::Swapper() : state_(new State) {}

Swapper::~Swapper() { cudaStreamSynchronize(state_->stream.get()); }

std::int64_t Swapper::start(const TensorRef& source, const TensorRef& target,
                            const std::vector<std::pair<std::int64_t, std::int64_t>>& pairs, StreamHandle after,
                            std::int64_t small_run) {
    const Arena from = as_arena(source, "source"), to = as_arena(target, "target");
    require(from.length == to.length && from.num_layers == to.num_layers, "target", "has another form than source");
    check_pairs(pairs, from, to);
    const plan::SwapPlan plan = plan::plan_swap(from, to, pairs, small_run);
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->forget_done();
    auto swap = std::make_shared<State::Swap>();
    swap->event = make_event();
    cudaStream_t stream = state_->stream.get();
    check(cudaEventRecord(state_->begin.get(), static_cast<cudaStream_t>(after)));
    check(cudaStreamWaitEvent(stream, state_->begin.get(), 0));
    if (plan.by_kernel) {
        swap->pairs = copy_by_kernel(source, target, plan, stream);
    } else if (!plan.copies.empty()) {
        copy_by_engine(from, to, plan.copies, stream);
    }
    const cudaError_t recorded = cudaEventRecord(swap->event.get(), stream);
    if (recorded != cudaSuccess) {
        cudaStreamSynchronize(stream);  // the kernel reads the pairs
        check(recorded);
    }
    state_->swaps.emplace(state_->next, std::move(swap));
    return state_->next++;
}

bool Swapper::done(std::int64_t ticket) {
    const auto swap = state_->find(ticket);
    if (!swap) {
        return true;
    }
    const cudaError_t status = cudaEventQuery(swap->event.get());
    if (status == cudaErrorNotReady) {
        return false;
    }
    check(status);
    state_->forget(ticket);
    return true;
}

void Swapper::let_wait(std::int64_t ticket, StreamHandle stream) {
    if (const auto swap = state_->find(ticket)) {
        check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), swap->event.get(), 0));
    }
}

void Swapper::wait(std::int64_t ticket) {
    if (const auto swap = state_->find(ticket)) {
        check(cudaEventSynchronize(swap->event.get()));
        state_->forget(ticket);
    }
}

}  // namespace octavo::cuda
