// See decode_mma.h.
#pragma once

#include "attention.h"
#include "prefill_mma.cuh"

namespace octavo::cuda {

template <typename T, template <typename> class Kind, int kDim>
KernelChoice prefill_choice() {
    return {prefill_mma_kernel<T, Kind, kDim>, kPrefillThreads, Prefill<T, Kind, kDim>::kShared, kPrefillRows};
}

template <typename T, int kDim>
KernelChoice prefill_choice_of(KvType kv) {
    switch (kv) {
        case KvType::kSame:
            return prefill_choice<T, Wide, kDim>();
        case KvType::kInt8:
            return prefill_choice<T, Int8, kDim>();
        default:
            return prefill_choice<T, Fp8, kDim>();
    }
}

}  // namespace octavo::cuda
