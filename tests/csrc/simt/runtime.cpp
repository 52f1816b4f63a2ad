// Unkind on purpose: warps and blocks run in random order, two blocks at a time; a warp's lanes begin anywhere; shared
// memory starts as NaN, with poison behind it; full masks only, and every thread must take part in every barrier.
#include "simt/runtime.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "simt/fiber.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define __asan_poison_memory_region(...)
#define __asan_unpoison_memory_region(...)
#endif

namespace octavo::simt {

Fiber* self = nullptr;
std::mt19937 chance(1);

void die(const char* what, const char* more, const char* still_more) {
    std::fprintf(stderr, "simt: %s%s%s", what, more, still_more);
    if (self) {
        const dim3& index = self->block->index;
        std::fprintf(stderr, " (block %u,%u,%u thread %u)", index.x, index.y, index.z, self->thread.x);
    }
    std::fprintf(stderr, "\n");
    std::abort();
}

void rendezvous(const char* what, void* operands, void (*execute)(void** operands)) {
    Warp& warp = *self->warp;
    if (warp.arrived == 0) {
        warp.what = what;
    } else if (warp.what != what && std::strcmp(warp.what, what) != 0) {
        die("lanes diverged: ", warp.what, what);
    }
    warp.operands[self->lane] = operands;
    if (++warp.arrived < kLanes) {
        self->state = Fiber::kWaiting;
        to_scheduler(false);
        return;
    }
    warp.arrived = 0;
    execute(warp.operands);
    for (int i = 0; i < kLanes; ++i) {
        (self - self->lane + i)->state = Fiber::kReady;
    }
}

void block_barrier() {
    Block& block = *self->block;
    if (self->warp->arrived != 0) {
        die("lanes diverged: ", self->warp->what, " and __syncthreads");
    }
    if (++block.arrived < static_cast<int>(block.fibers.size())) {
        self->state = Fiber::kWaiting;
        to_scheduler(false);
        return;
    }
    block.arrived = 0;
    for (Fiber& fiber : block.fibers) {
        fiber.state = Fiber::kReady;
    }
}

namespace {

void entry() {
    arrived_in_fiber();
    self->block->body.call(self->block->body.arguments);
    for (const std::vector<Copy>& group : self->groups) {
        if (!group.empty()) {
            die("a thread ends while its copies are on their way");
        }
    }
    if (!self->open.empty()) {
        die("a thread ends with copies it never committed");
    }
    self->state = Fiber::kDone;
    --self->block->alive;
    to_scheduler(true);
}

std::size_t shared_room(std::size_t bytes) { return (bytes + 127) / 128 * 128 + 128; }

std::unique_ptr<Block> make_block(dim3 index, dim3 grid, int threads, std::size_t shared_bytes, Body body) {
    auto block = std::make_unique<Block>();
    block->index = index;
    block->grid = grid;
    block->size = dim3(static_cast<unsigned>(threads));
    block->body = body;
    block->alive = threads;
    block->fibers.resize(static_cast<std::size_t>(threads));
    block->warps.resize(static_cast<std::size_t>(threads / kLanes));
    block->shared_bytes = shared_bytes;
    block->shared = static_cast<unsigned char*>(std::aligned_alloc(128, shared_room(shared_bytes)));
    std::memset(block->shared, 0xff, shared_bytes);
    __asan_poison_memory_region(block->shared + shared_bytes, shared_room(shared_bytes) - shared_bytes);
    for (int i = 0; i < threads; ++i) {
        Fiber& fiber = block->fibers[static_cast<std::size_t>(i)];
        fiber.block = block.get();
        fiber.thread = dim3(static_cast<unsigned>(i), 0, 0);
        fiber.lane = i % kLanes;
        fiber.warp = &block->warps[static_cast<std::size_t>(i / kLanes)];
        prepare(fiber, entry);
    }
    return block;
}

void end_block(Block& block) {
    for (Fiber& fiber : block.fibers) {
        give_back_stack(fiber);
    }
    __asan_unpoison_memory_region(block.shared, shared_room(block.shared_bytes));
    std::free(block.shared);
}

// Runs the ready lanes of a warp up to their next rendezvous, beginning anywhere.
bool run_warp(Block& block, std::size_t warp) {
    bool ran = false;
    const std::size_t start = chance() % kLanes;
    for (std::size_t i = 0; i < kLanes; ++i) {
        Fiber& fiber = block.fibers[warp * kLanes + (start + i) % kLanes];
        if (fiber.state == Fiber::kReady) {
            to_fiber(fiber);
            ran = true;
        }
    }
    return ran;
}

void run_step(std::vector<std::unique_ptr<Block>>& resident) {
    std::vector<std::pair<Block*, std::size_t>> all;
    for (auto& block : resident) {
        for (std::size_t warp = 0; warp < block->warps.size(); ++warp) {
            all.emplace_back(block.get(), warp);
        }
    }
    std::shuffle(all.begin(), all.end(), chance);
    bool ran = false;
    for (auto& [block, warp] : all) {
        ran = (chance() % 4 != 0 && run_warp(*block, warp)) || ran;
    }
    if (!ran) {
        for (auto& [block, warp] : all) {
            ran = run_warp(*block, warp) || ran;
        }
    }
    if (!ran) {
        die("deadlock: threads wait at different barriers, or some have ended");
    }
}

std::vector<dim3> shuffled(dim3 grid) {
    std::vector<dim3> all;
    for (unsigned z = 0; z < grid.z; ++z) {
        for (unsigned y = 0; y < grid.y; ++y) {
            for (unsigned x = 0; x < grid.x; ++x) {
                all.emplace_back(x, y, z);
            }
        }
    }
    std::shuffle(all.begin(), all.end(), chance);
    return all;
}

}  // namespace

void run_grid(dim3 grid, int threads, std::size_t shared_bytes, Body body) {
    if (threads % kLanes != 0 || threads <= 0 || threads > 1024 || shared_bytes > 227 * 1024 || grid.y > 65535 ||
        grid.z > 65535) {
        die("no device runs such a launch");
    }
    std::vector<dim3> waiting = shuffled(grid);
    std::vector<std::unique_ptr<Block>> resident;
    while (!waiting.empty() || !resident.empty()) {
        while (resident.size() < 2 && !waiting.empty()) {
            resident.push_back(make_block(waiting.back(), grid, threads, shared_bytes, body));
            waiting.pop_back();
        }
        run_step(resident);
        for (std::size_t i = resident.size(); i-- > 0;) {
            if (resident[i]->alive == 0) {
                end_block(*resident[i]);
                resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(i));
            }
        }
    }
}

}  // namespace octavo::simt
