// Which instruction sets this processor and its operating system offer; asked once, through cpuid.
#pragma once

#include <string>
#include <vector>

namespace octavo {

// The kernels come in one translation unit per level; a level includes those before it.
enum class Isa {
    kEmulated,    // plain C++17, and AMX's tiles written out: for tests alone, since every machine runs it
    kGeneric,     // plain C++17
    kAvx2,        // AVX2, FMA and F16C
    kAvx512,      // AVX-512 F, BW, DQ, VL and VNNI
    kAvx512Bf16,  // AVX-512 BF16
    kAmx,         // AMX tiles of bf16 and of int8, which Linux has let this process use
};
constexpr Isa kIsas[] = {Isa::kEmulated, Isa::kGeneric, Isa::kAvx2, Isa::kAvx512, Isa::kAvx512Bf16, Isa::kAmx};

// The fastest level of those that this machine runs; `kernels()` (cpu/kernels.h) may use a lesser one, of those that
// were built. Never throws; the first call asks, later ones remember.
Isa best_isa();

// Whether this machine runs a level: those below the fastest one, and sometimes one above.
bool runs(Isa isa);

// Whether the level is not slower here than the one below it.
bool is_fast(Isa isa);

// "emulated", "generic", "avx2", "avx512", "avx512_bf16" or "amx": the name shown in logs and by `octavo doctor`.
const char* isa_name(Isa isa);

// The features that were found, in the spelling of /proc/cpuinfo, for example "avx2". A subset of those that octavo
// knows and that both the CPU and the operating system support.
std::vector<std::string> cpu_features();

}  // namespace octavo
