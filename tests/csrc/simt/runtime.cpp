// Unkind on purpose: warps and blocks run in random order, two blocks at a time; between rendezvous a warp's lanes run
// in random order, and not always all of them before other warps go far; shared memory starts as NaN, with poison
// behind it; full masks only, and every thread must take part in every barrier.
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

namespace {

// The calls that led here, as one number. Frames are kept (-fno-omit-frame-pointer); a fiber's first one has none
// before it.
std::uintptr_t call_site() {
    const auto* bottom = self->stack;
    std::uintptr_t site = 0;
    const auto* frame = static_cast<void* const*>(__builtin_frame_address(0));
    while (frame != nullptr) {
        site = site * 0x9e3779b97f4a7c15U + reinterpret_cast<std::uintptr_t>(frame[1]);
        const auto* next = static_cast<void* const*>(frame[0]);
        frame = next > frame && reinterpret_cast<const unsigned char*>(next) > bottom ? next : nullptr;
    }
    return site;
}

void require_same_site(std::uintptr_t& all, bool first, const char* what) {
    const std::uintptr_t mine = call_site();
    if (first) {
        all = mine;
    } else if (all != mine) {
        die("lanes of a warp came to an instruction by different calls: ", what);
    }
}

}  // namespace

void rendezvous(Lanes lanes, const char* what, void* operands, void (*execute)(void** operands)) {
    Warp& warp = *self->warp;
    if (warp.arrived == 0) {
        warp.what = what;
    } else if (warp.what != what && std::strcmp(warp.what, what) != 0) {
        die("lanes diverged: ", warp.what, what);
    }
    if (warp.at_barrier != 0) {
        die("lanes diverged: __syncthreads and ", what);
    }
    if (lanes == Lanes::kTogether) {
        require_same_site(warp.site, warp.arrived == 0, what);
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
    Warp& warp = *self->warp;
    if (warp.arrived != 0) {
        die("lanes diverged: ", warp.what, " and __syncthreads");
    }
    require_same_site(warp.site, warp.at_barrier == 0, "__syncthreads");
    ++warp.at_barrier;
    if (++block.arrived < static_cast<int>(block.fibers.size())) {
        self->state = Fiber::kWaiting;
        to_scheduler(false);
        return;
    }
    block.arrived = 0;
    ++block.barriers;
    for (Warp& each : block.warps) {
        each.at_barrier = 0;
    }
    for (Fiber& fiber : block.fibers) {
        fiber.state = Fiber::kReady;
    }
}

namespace {

bool has_ended(const Barrier& barrier, unsigned parity) { return barrier.phase % 2 != parity; }

bool can_run(const Fiber& fiber) {
    return fiber.state == Fiber::kReady ||
           (fiber.state == Fiber::kSpinning && has_ended(*fiber.spins_at, fiber.spins_for));
}

}  // namespace

void end_phase(Barrier& barrier) {
    if (barrier.pending == 0 && barrier.bytes == 0) {
        ++barrier.phase;
        barrier.pending = barrier.count;
    }
}

void spin(const Barrier& barrier, unsigned parity) {
    if (has_ended(barrier, parity)) {
        return;
    }
    self->spins_at = &barrier;
    self->spins_for = parity;
    self->state = Fiber::kSpinning;
    to_scheduler(false);
    self->state = Fiber::kReady;
}

Arrival* arrival_at(const void* p) {
    Block& block = *self->block;
    const auto* place = static_cast<const unsigned char*>(p);
    if (place < block.shared || place >= block.shared + block.shared_bytes) {
        return nullptr;
    }
    block.arrivals.resize((block.shared_bytes + 15) / 16);
    return &block.arrivals[static_cast<std::size_t>(place - block.shared) / 16];
}

void require_arrived(const void* p) {
    const Arrival* found = arrival_at(p);
    if (found == nullptr || found->by == nullptr) {
        return;
    }
    const bool all = found->block_barriers < self->block->barriers;
    const bool warp = found->by->warp == self->warp && found->warp_barriers < self->warp->barriers;
    if (!found->waited || (!all && !warp)) {
        die("lanes read what an asynchronous copy brings, and no barrier follows the wait for it");
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
    if (self->block->alive == 1 && !self->block->bulk.empty()) {
        die("a thread block ends while its copies in bulk are on their way");
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

// Runs lanes of a warp that can run, at most `most`, up to their next rendezvous.
bool run_warp(Block& block, std::size_t warp, int most) {
    const std::uint32_t order = chance();
    const std::uint32_t start = order & 31, step = (order >> 5 & 31) | 1, flip = order >> 10 & 31;
    int ran = 0;
    for (std::uint32_t i = 0; i < kLanes && ran < most; ++i) {
        Fiber& fiber = block.fibers[warp * kLanes + (((i * step + start) % kLanes) ^ flip)];
        if (can_run(fiber)) {
            to_fiber(fiber);
            ++ran;
        }
    }
    return ran > 0;
}

// One copy in bulk arrives, any of them.
bool bring(Block& block) {
    if (block.bulk.empty()) {
        return false;
    }
    const std::size_t which = chance() % block.bulk.size();
    const BulkCopy copy = block.bulk[which];
    block.bulk.erase(block.bulk.begin() + static_cast<std::ptrdiff_t>(which));
    std::memcpy(copy.to, copy.from, copy.bytes);
    copy.barrier->bytes -= static_cast<std::int64_t>(copy.bytes);
    end_phase(*copy.barrier);
    return true;
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
        int& asleep = block->warps[warp].asleep;
        const auto luck = chance();
        if (asleep > 0) {
            --asleep;
        } else if (luck % 4 != 0) {
            const bool some = luck / 4 % 4 == 0;
            ran = run_warp(*block, warp, some ? static_cast<int>(luck / 16 % kLanes + 1) : kLanes) || ran;
            asleep = some ? static_cast<int>(luck / 512 % 16) : 0;
        }
        ran = ((luck >> 16) % 4 == 0 && bring(*block)) || ran;
    }
    if (!ran) {
        for (auto& [block, warp] : all) {
            ran = run_warp(*block, warp, kLanes) || bring(*block) || ran;
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
    if (threads % kLanes != 0) {
        die("a thread block that is not made of whole warps");
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
