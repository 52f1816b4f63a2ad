// Streams of the simulator, and what tests may ask of its CUDA runtime.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace octavo::simt {

// Queues work on a stream made by cudaStreamCreateWithFlags; on the null stream it is done at once.
void enqueue(void* stream, std::function<void()> work);

// ---- for tests -----------------------------------------------------------------------------------------------------

// Calls made from now on, one letter each: b(atch of copies, and how many), e(vent), h(ost memory),
// k(ernel on a stream), r(ecord), s(tream), w(ait).
std::string take_calls();
// The call after `calls` more ones fails; -1: none does.
void fail_after(int calls);
// Streams, events and pieces of host memory that were made and not given back.
int live();
// Memory that the runtime says is of `type` (as in cudaMemoryType) and of `device`.
void place_memory(std::uintptr_t begin, std::uintptr_t bytes, int type, int device);

}  // namespace octavo::simt
