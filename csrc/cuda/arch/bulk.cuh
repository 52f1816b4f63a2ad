// Copies in bulk and the barriers that wait for them: instructions that devices have from sm_90 on. No kernel of octavo
// uses them yet; tests/csrc/simt/probes.cu does. tests/csrc/simt/instructions.h has the same functions for a CPU.
#pragma once

#include <cstdint>

#include "arch/ptx.cuh"

namespace octavo::cuda {

// In shared memory. A phase of it ends when all arrivals and all bytes that it expects have come; then the next begins.
using BulkBarrier = std::uint64_t;

// By one thread; the others may use it after publish_barriers by that thread and a barrier of the thread block.
__device__ __forceinline__ void make_barrier(BulkBarrier* barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(BulkBarrier* barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
                 : "memory");
}
// Arrives, and makes the phase wait for so many bytes more.
__device__ __forceinline__ void arrive_expecting(BulkBarrier* barrier, unsigned bytes) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}
// Returns when the phase of that parity has ended: 0 is the first one's. The phase before the first has parity 1.
__device__ __forceinline__ void wait_for_phase(BulkBarrier* barrier, unsigned parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra "
        "again%=;\n}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}
// `bytes` (a multiple of 16) from global to shared memory, both at multiples of 16. One thread calls it for all.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, unsigned bytes, BulkBarrier* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

}  // namespace octavo::cuda
