// The one file that calls the copy engines. plan/swap_plan.cpp decides what is copied, and how.
#include "swap.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <type_traits>

#include "arch/simt.h"
#include "common/arena.h"
#include "plan/swap_plan.h"

namespace octavo::cuda {
namespace {

void check(cudaError_t status) { octavo::cuda::check(status, "swap"); }

// Whether the work before the event is done.
bool has_passed(cudaEvent_t event) {
    const cudaError_t status = cudaEventQuery(event);
    if (status == cudaErrorNotReady) {
        cudaGetLastError();  // which the runtime counts as an error of ours, too
        return false;
    }
    check(status);
    return true;
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
using Pairs = std::vector<std::pair<std::int64_t, std::int64_t>>;

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

// Pinned memory for the pairs that kernels read, made once: to allocate pinned memory waits for the device. Swaps end
// in the order in which they began, so the pairs of all that go on lie between two places. Places count pairs and never
// go back.
class PairRing {
  public:
    explicit PairRing(std::int64_t room) : room_(room) {
        void* memory = nullptr;
        check(cudaHostAlloc(&memory, 16 * static_cast<std::size_t>(room), cudaHostAllocDefault));
        memory_.reset(static_cast<std::int64_t*>(memory));
    }

    // A copy of the pairs, side by side, or null where there is no room now. They are kept up to the place `end`.
    std::int64_t* add(const Pairs& pairs) {
        const auto count = static_cast<std::int64_t>(pairs.size());
        std::int64_t place = end_;
        if (place % room_ + count > room_) {
            place += room_ - place % room_;
        }
        if (place + count - (begin_ == end_ ? place : begin_) > room_) {
            return nullptr;
        }
        begin_ = begin_ == end_ ? place : begin_;
        end_ = place + count;
        std::int64_t* const list = memory_.get() + 2 * (place % room_);
        std::int64_t* next = list;
        for (const auto& [from, to] : pairs) {
            *next++ = from;
            *next++ = to;
        }
        return list;
    }
    std::int64_t end() const { return end_; }
    // Nobody reads what lies before `place` any more.
    void give_back(std::int64_t place) { begin_ = std::max(begin_, place); }

  private:
    PinnedPairs memory_;
    std::int64_t room_, begin_ = 0, end_ = 0;
};

void check_pairs(const Pairs& pairs, const Arena& from, const Arena& to) {
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
void copy_by_kernel(const TensorRef& source, const TensorRef& target, std::int64_t* list, std::size_t count,
                    cudaStream_t stream) {
    constexpr int kCopyingBlocks = 8;
    TensorRef pairs;
    pairs.data = list;
    pairs.dtype = DType::kI64;
    pairs.ndim = 2;
    pairs.shape[0] = static_cast<std::int64_t>(count);
    pairs.shape[1] = pairs.stride[0] = 2;
    pairs.stride[1] = 1;
    copy_blocks(source, target, pairs, kCopyingBlocks, stream);
}

}  // namespace

struct Swapper::State {
    // A swap that is not yet known to be done.
    struct Swap {
        Event event;
        std::int64_t pairs_end = 0;  // in the ring
    };

    explicit State(std::int64_t room) : ring(room) {}

    std::mutex mutex;
    CopyStream stream = make_stream();
    Event begin = make_event();
    PairRing ring;
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
        if (const auto found = swaps.find(ticket); found != swaps.end()) {
            drop(found);
        }
    }
    // Tickets whose callers never ask again must not pile up. Swaps end in order.
    void forget_done() {
        while (!swaps.empty() && has_passed(swaps.begin()->second->event.get())) {
            drop(swaps.begin());
        }
    }

  private:
    void drop(std::map<std::int64_t, std::shared_ptr<Swap>>::iterator done) {
        ring.give_back(done->second->pairs_end);
        swaps.erase(done);
    }
};

Swapper::Swapper(std::int64_t room) {
    require(room > 0 && room <= 1 << 24, "room", "is not positive, or too large");
    state_ = std::make_unique<State>(room);
}

Swapper::~Swapper() { cudaStreamSynchronize(state_->stream.get()); }

std::int64_t Swapper::start(const TensorRef& source, const TensorRef& target, const Pairs& pairs, StreamHandle after,
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
    std::int64_t* const list = plan.by_kernel ? state_->ring.add(plan.pairs) : nullptr;
    swap->pairs_end = state_->ring.end();
    try {
        if (list) {
            copy_by_kernel(source, target, list, plan.pairs.size(), stream);
        } else if (!plan.copies.empty()) {
            copy_by_engine(from, to, plan.copies, stream);
        }
        check(cudaEventRecord(swap->event.get(), stream));
    } catch (...) {
        cudaStreamSynchronize(stream);  // a kernel may read the pairs
        state_->ring.give_back(swap->pairs_end);
        throw;
    }
    state_->swaps.emplace(state_->next, std::move(swap));
    return state_->next++;
}

bool Swapper::done(std::int64_t ticket) {
    const auto swap = state_->find(ticket);
    if (!swap) {
        return true;
    }
    if (!has_passed(swap->event.get())) {
        return false;
    }
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
