// Each file of this folder instantiates one type and one head size, so that they compile at the same time.
#pragma once

#include "attention.h"
#include "decode_mma.cuh"

namespace octavo::cuda {

template <typename T, template <typename> class Kind, int kDim, int kGroups>
KernelChoice decode_choice() {
    using D = Decode<T, Kind, kDim, kGroups>;
    return {decode_mma_kernel<T, Kind, kDim, kGroups>, kDecodeThreads, D::kShared, D::kRows};
}

template <typename T, int kDim, int kGroups>
KernelChoice decode_choice_with(KvType kv) {
    switch (kv) {
        case KvType::kSame:
            return decode_choice<T, Wide, kDim, kGroups>();
        case KvType::kInt8:
            return decode_choice<T, Int8, kDim, kGroups>();
        default:
            return decode_choice<T, Fp8, kDim, kGroups>();
    }
}

template <typename T, int kDim>
KernelChoice decode_choice_of(KvType kv, int groups) {
    if constexpr (kDim < 256) {
        if (groups == 2) {
            return decode_choice_with<T, kDim, 2>(kv);
        }
    }
    (void)groups;
    return decode_choice_with<T, kDim, 1>(kv);
}

}  // namespace octavo::cuda
