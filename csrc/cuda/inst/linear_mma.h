// Each file of this folder instantiates one type.
#pragma once

#include "linear.h"

namespace octavo::cuda {

template <typename Weight, int kRows, int kTokens, int kRowWarps, int kTokenWarps, int kStages>
bool launch_tiles(LinearParams<Weight>& p, Stream stream, bool only_if_busy) {
    using L = Linear<Weight, kRows, kTokens, kRowWarps, kTokenWarps, kStages>;
    const auto kernel = linear_mma_kernel<Weight, kRows, kTokens, kRowWarps, kTokenWarps, kStages>;
    const int most = resident_blocks(kernel, L::kThreads, L::kShared);
    p.tiling = Tiling::of(p.rows, p.tokens, kRows, kTokens);
    if (only_if_busy && p.tiling.count() < most) {
        return false;
    }
    launch(kernel, dim3(static_cast<unsigned>(std::min(p.tiling.count(), most))), L::kThreads, L::kShared, stream, p);
    return true;
}

template <typename Weight>
void launch_linear(LinearParams<Weight> p, Stream stream) {
    if (p.tokens <= kFewTokens) {
        launch_tiles<Weight, 32, 16, 2, 1, 6>(p, stream, false);
    } else if (p.tokens <= kSomeTokens || !launch_tiles<Weight, 128, 128, 4, 2, 3>(p, stream, true)) {
        launch_tiles<Weight, 32, 64, 2, 2, 4>(p, stream, false);
    }
}

}  // namespace octavo::cuda
