// What kernels find wrong with numbers that lie on the device, where nobody can look before a launch.
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

// Where kernels say so: pinned host memory, for take_fault (device.h). Whoever comes last is heard.
using FaultWord = std::int32_t*;

__device__ __forceinline__ void tell(FaultWord word, Fault fault) { *word = static_cast<std::int32_t>(fault); }

// Whether `id` is one of `count`; if not, it is told.
__device__ __forceinline__ bool is_one_of(std::int64_t id, std::int64_t count, FaultWord word, Fault fault) {
    const bool good = id >= 0 && id < count;
    if (!good) {
        tell(word, fault);
    }
    return good;
}

}  // namespace octavo::cuda
