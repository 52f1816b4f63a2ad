#include "attention_simt.cuh"

#include "attention.h"
#include "common/dispatch.h"

namespace octavo::cuda {

KernelChoice attention_simt(DType dtype, KvType kv, int head_dim) {
    KernelChoice choice{};
    with_kv(dtype, kv, "query", [&](auto t, auto c) {
        using T = typename decltype(t)::Type;
        using C = typename decltype(c)::Type;
        choice = {attention_simt_kernel<T, C>, kSimtThreads, simt_shared_bytes(head_dim), kSimtRows};
    });
    return choice;
}

}  // namespace octavo::cuda
