// Copies blocks between the device and the host on a stream of its own, beside the computing work.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "api.h"

namespace octavo::cuda {

// Several threads may share a Swapper.
class Swapper {
  public:
    // room: how many pairs of swaps that go on have a place in pinned memory, for the kernel that copies small blocks.
    // A swap that finds no place there is left to the copy engines.
    explicit Swapper(std::int64_t room = 1 << 16);
    ~Swapper();  // waits for copies that are under way
    Swapper(const Swapper&) = delete;
    Swapper& operator=(const Swapper&) = delete;

    // Begins to copy blocks (from, to) in all layers, once all that is queued on `after` is done. Arenas are [layers,
    // blocks, ...] of one form; a host arena is pinned. No block is the target of two pairs, nor, within one arena,
    // both source and target. Neighbours go together in one call of the copy engines; where copies are many and
    // smaller than `small_run` bytes, a few thread blocks copy. Returns a ticket.
    std::int64_t start(const TensorRef& source, const TensorRef& target,
                       const std::vector<std::pair<std::int64_t, std::int64_t>>& pairs, StreamHandle after,
                       std::int64_t small_run);

    // Whether the copies of a ticket are done. Never waits.
    bool done(std::int64_t ticket);

    // Makes work queued on `stream` after this call wait for the copies of the ticket. The host does not wait.
    void let_wait(std::int64_t ticket, StreamHandle stream);

    // Waits on the host until the copies of the ticket are done.
    void wait(std::int64_t ticket);

  private:
    struct State;
    std::unique_ptr<State> state_;
};

}  // namespace octavo::cuda
