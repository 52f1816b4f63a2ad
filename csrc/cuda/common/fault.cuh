// How a kernel tells the host that a number on the device is wrong. The host cannot look at such numbers before a
// launch.
#pragma once

#include <cstdint>

#include "arch/simt.h"

namespace octavo::cuda {

enum class Fault : std::int32_t {
    kNone,
    kBlockTables,
    kCuQ,
    kSeqLens,
    kPlan,
    kSlots,
    kPositions,
    kBlockIds,
    kPairs,
    kOffsets
};

// Where kernels tell faults: a word of pinned host memory, for take_fault (device.h). The fault told last counts.
using FaultWord = std::int32_t*;

__device__ __forceinline__ void tell(FaultWord word, Fault fault) { *word = static_cast<std::int32_t>(fault); }

// Whether 0 <= `id` < `count`; if not, the host is told.
__device__ __forceinline__ bool is_one_of(std::int64_t id, std::int64_t count, FaultWord word, Fault fault) {
    const bool good = id >= 0 && id < count;
    if (!good) {
        tell(word, fault);
    }
    return good;
}

}  // namespace octavo::cuda
