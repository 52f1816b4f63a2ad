// Which instruction sets this processor and its operating system offer; asked once, through cpuid.
#pragma once

#include <string>
#include <vector>

namespace octavo {

// The kernels come in one translation unit per level; a level includes those before it.
enum class Isa {
    kGeneric,  // plain C++17
    kAvx2,     // AVX2, FMA and F16C
    kAvx512,   // AVX-512 F, BW, DQ, VL and VNNI
};

// The best level this machine runs. Never throws; the first call asks, later ones remember.
Isa best_isa();

// "generic", "avx2" or "avx512": the name shown in logs and by `octavo doctor`.
const char* isa_name(Isa isa);

// The features that were found, in the spelling of /proc/cpuinfo, for example "avx2". A subset of those that octavo
// knows and that both the CPU and the operating system support.
std::vector<std::string> cpu_features();

}  // namespace octavo
