// The blocks of an arena [layers, blocks, ...] as runs of bytes.
#pragma once

#include "octavo/tensor.h"
#include "plan/swap_plan.h"

namespace octavo::cuda {

struct Arena : plan::ArenaForm {
    unsigned char* data;
};

inline Arena as_arena(const TensorRef& t, const char* name) {
    usable(t, name);
    require(t.ndim >= 3, name, "has less than three dimensions");
    std::int64_t run = 1;
    for (int i = t.ndim - 1; i >= 2; --i) {
        require(t.shape[i] == 1 || t.stride[i] == run, name, "has blocks that are not contiguous");
        run *= t.shape[i];
    }
    const std::int64_t size = size_of(t.dtype);
    return {{t.shape[0], t.shape[1], t.stride[0] * size, t.stride[1] * size, run * size}, t.as<unsigned char>()};
}

}  // namespace octavo::cuda
