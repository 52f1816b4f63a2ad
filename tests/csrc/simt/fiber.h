// Changing stacks, and telling AddressSanitizer.
#pragma once

#include "simt/runtime.h"

namespace octavo::simt {

// Makes a fiber that begins in `entry` when it is first switched to, on a stack from a pool.
void prepare(Fiber& fiber, void (*entry)());
void give_back_stack(Fiber& fiber);

void to_fiber(Fiber& fiber);
// From a fiber, which never runs again if this is its `last` switch.
void to_scheduler(bool last);
// First of all in a fiber.
void arrived_in_fiber();

}  // namespace octavo::simt
