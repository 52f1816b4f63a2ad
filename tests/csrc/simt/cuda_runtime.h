// What tests may ask of the simulator's CUDA runtime.
#pragma once

#include <cstdint>
#include <string>

namespace octavo::simt {

// What a host does that reads an op's results: runs the null stream to its end, unless a test holds it. The ops of the
// extension do so when they have returned; so what an op still needs must outlive it.
void settle(std::uintptr_t stream);
// Whether the null stream keeps its work until it is waited for, as other streams do.
void hold_null_stream(bool held);
// Waits for all work of a stream; 0: of the null stream.
void synchronize(std::uintptr_t stream);
std::uintptr_t make_stream();
void end_stream(std::uintptr_t stream);

// Calls made from now on, one letter each: a(sks for shared memory), b(atch of copies, and how many), e(vent),
// h(ost memory), k(ernel; K: on the null stream), r(ecord), s(tream), w(ait).
std::string take_calls();
// The call after `calls` more ones fails; -1: none does.
void fail_after(int calls);
// A lost device: every call fails, and no call clears the error.
void lose_device(bool lost);
// The error that a failed call has left and nobody has cleared; 0: none.
int last_error();
// The current device becomes the `which`-th of a list (cuda_runtime.cpp), from its start again; gives its limit of
// shared memory.
int choose_device(int which);
// The current device has this compute capability; the driver is for CUDA `driver`, such as 12080, or not there (0); it
// finds `count` devices. 0: none, because the driver is too old or not there.
void choose_versions(int major, int minor, int driver, int count);
// Streams, events and pieces of host memory that were made and not given back.
int live();
// Memory that the runtime says is of `type` (as in cudaMemoryType) and of `device`.
void place_memory(std::uintptr_t begin, std::uintptr_t bytes, int type, int device);

}  // namespace octavo::simt
