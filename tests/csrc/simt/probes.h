// Small kernels that use what no kernel of octavo uses yet, or use it more barely: whether the simulator sees mistakes.
#pragma once

#include "octavo/tensor.h"

namespace octavo::simt {

// out float32 [128]: the sums of x float32 [pieces, 128] over pieces, which a warp copies in bulk to a ring and two
// others add.
void ring_probe(const TensorRef& out, const TensorRef& x, void* stream);
// out float32 [1]: the sum of x float32 [32 n]. Each of n thread blocks stores 32 numbers in `room` float32 [32 n]; the
// one that comes last, by `counter` int32 [1], adds them.
void last_block_probe(const TensorRef& out, const TensorRef& x, const TensorRef& room, const TensorRef& counter,
                      void* stream);

}  // namespace octavo::simt
