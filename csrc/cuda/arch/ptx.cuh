// Every instruction that C++ has no name for, and nothing else. tests/csrc/simt/instructions.h has the same functions
// for a CPU.
#pragma once

#include <cstdint>
#include <type_traits>

namespace octavo::cuda {

// What an element is stored as. Plain bits, so that host code and the simulator need none of CUDA's headers.
struct Half {
    std::uint16_t bits;
};
struct BFloat {
    std::uint16_t bits;
};
template <typename T>
constexpr bool kIsHalf = std::is_same_v<T, Half>;

__device__ __forceinline__ std::uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(std::uint32_t x) { return __uint_as_float(x); }

__device__ __forceinline__ float to_float(Half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
__device__ __forceinline__ float to_float(BFloat x) { return __uint_as_float(std::uint32_t{x.bits} << 16); }

__device__ __forceinline__ void from_float(float x, Half& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ __forceinline__ void from_float(float x, BFloat& y) {
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
}

// Two numbers side by side, the first in the low half.
template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high) {
    std::uint32_t y;
    if constexpr (kIsHalf<T>) {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
    }
    return y;
}

// a * b + c on pairs.
template <typename T>
__device__ __forceinline__ std::uint32_t fma2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    std::uint32_t y;
    if constexpr (kIsHalf<T>) {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    } else {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(c));
    }
    return y;
}
// a * b and a - b: for bfloat16, sm_80 has no instructions of their own.
template <typename T>
__device__ __forceinline__ std::uint32_t mul2(std::uint32_t a, std::uint32_t b) {
    return fma2<T>(a, b, 0x80008000U);
}
template <typename T>
__device__ __forceinline__ std::uint32_t sub2(std::uint32_t a, std::uint32_t b) {
    return fma2<T>(b, kIsHalf<T> ? 0xbc00bc00U : 0xbf80bf80U, a);
}

// Byte i of the result is byte (selector >> 4i & 7) of the eight bytes a, b.
__device__ __forceinline__ std::uint32_t permute_bytes(std::uint32_t a, std::uint32_t b, std::uint32_t selector) {
    std::uint32_t y;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(y) : "r"(a), "r"(b), "r"(selector));
    return y;
}

// ---- fp8 -----------------------------------------------------------------------------------------------------------

// Whether there are instructions for fp8: from sm_89 on. Where not, the two functions below are not called.
__device__ __forceinline__ bool converts_fp8() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    return true;
#else
    return false;
#endif
}

// Two numbers of the low half of x, as halves: e4m3, or e5m2. NaN of e4m3 is NaN.
template <bool kE5M2>
__device__ __forceinline__ std::uint32_t halves_of_fp8([[maybe_unused]] std::uint32_t x) {
    std::uint32_t y = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    const auto pair = static_cast<std::uint16_t>(x);
    if constexpr (kE5M2) {
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(y) : "h"(pair));
    } else {
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(pair));
    }
#endif
    return y;
}

// Two numbers as fp8, the first in the low byte: to nearest, ties to even; what is too large becomes the largest
// number, NaN a positive NaN.
template <bool kE5M2>
__device__ __forceinline__ std::uint16_t fp8_of([[maybe_unused]] float low, [[maybe_unused]] float high) {
    std::uint16_t y = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    if constexpr (kE5M2) {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
    }
#endif
    return y;
}

__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// ---- shared memory -------------------------------------------------------------------------------------------------

// This block's dynamic shared memory; kernels have no other.
__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(128) unsigned char memory[];
    return memory;
}

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory past L1, where a page is not looked at twice; zeros if not `valid`, and then
// `from` is not read.
__device__ __forceinline__ void copy_async16(void* to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
}
// Closes a group of this thread's copies.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Returns when all but the latest kPending groups of this thread have arrived.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four 8x8 matrices of 16-bit elements; lane i names row i % 8 of matrix i / 8. In each, this lane gets
// [lane / 4][2 (lane % 4)] and its right neighbour; transposed: [2 (lane % 4)][lane / 4] and the one below it.
__device__ __forceinline__ void load_matrices(std::uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
// An 8x8 matrix held as above, transposed.
__device__ __forceinline__ std::uint32_t transpose_matrix(std::uint32_t x) {
    std::uint32_t y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

// c[16, 8] += a[16, 16] b[16, 8]
template <typename T>
__device__ __forceinline__ void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                             std::uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<Half>(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                   std::uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<BFloat>(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                     std::uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// c[16, 8] += a[16, 32] b[32, 8], of e4m3 with four neighbours of k in a word. A device adds in an order of its own,
// the same one for every number of a tile. Those with an instruction for it (8.9, 12.x) are said to keep about 14 bits
// of a sum; for 9.0 and 10.x ptxas makes float16 of the numbers and two products with sums in float32. NaN where the
// code is for devices before 8.9, or made by an nvcc before 12.4, which has no name for it: multiplies_fp8 says where.
__device__ __forceinline__ void multiply_add_e4m3(float (&c)[4], [[maybe_unused]] const std::uint32_t (&a)[4],
                                                  [[maybe_unused]] std::uint32_t b0,
                                                  [[maybe_unused]] std::uint32_t b1) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890 && CUDART_VERSION >= 12040
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    c[0] = c[1] = c[2] = c[3] = __uint_as_float(0x7fffffffU);
#endif
}

// ---- between blocks ------------------------------------------------------------------------------------------------

// Adds and returns the number before. A thread block that reads the sum sees all that this block's barrier ordered
// before.
__device__ __forceinline__ std::int32_t add_acquire_release(std::int32_t* p, std::int32_t x) {
    std::int32_t old;
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(x) : "memory");
    return old;
}
// Past L1, which may hold what another block has since replaced.
__device__ __forceinline__ float load_shared_result(const float* p) {
    float x;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(p) : "memory");
    return x;
}
__device__ __forceinline__ void load_shared_results(const float* p, float (&x)[1]) { x[0] = load_shared_result(p); }
__device__ __forceinline__ void load_shared_results(const float* p, float (&x)[4]) {
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
                 : "l"(p)
                 : "memory");
}

}  // namespace octavo::cuda
