#include "octavo/isa.h"

#include <algorithm>
#include <cstdint>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#define OCTAVO_X86 1
#endif

namespace octavo {
namespace {

#ifdef OCTAVO_X86

enum class Register { kEbx, kEcx, kEdx };

// What must be saved on a context switch for the registers to be usable: bits of XCR0.
constexpr std::uint32_t kYmmState = 0x06;  // SSE and AVX
constexpr std::uint32_t kZmmState = 0xe6;  // and opmask, upper ZMM0-15, ZMM16-31

struct Feature {
    const char* name;
    unsigned leaf;     // of cpuid, sub-leaf 0
    Register where;    // the register of the answer
    unsigned bit;      // in it
    std::uint32_t os;  // bits of XCR0 that must be set
};

constexpr Feature kFeatures[] = {
    {"avx2", 7, Register::kEbx, 5, kYmmState},      {"fma", 1, Register::kEcx, 12, kYmmState},
    {"f16c", 1, Register::kEcx, 29, kYmmState},     {"avx512f", 7, Register::kEbx, 16, kZmmState},
    {"avx512dq", 7, Register::kEbx, 17, kZmmState}, {"avx512bw", 7, Register::kEbx, 30, kZmmState},
    {"avx512vl", 7, Register::kEbx, 31, kZmmState}, {"avx512_vnni", 7, Register::kEcx, 11, kZmmState},
    {"amx_tile", 7, Register::kEdx, 24, kZmmState},
};

// XCR0, or 0 where the operating system has not enabled XSAVE (then xgetbv itself would fault).
std::uint32_t enabled_state() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned kOsxsave = 1U << 27;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & kOsxsave) == 0) {
        return 0;
    }
    std::uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

bool present(const Feature& feature, std::uint32_t state) {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid_count(feature.leaf, 0, &eax, &ebx, &ecx, &edx) == 0) {
        return false;
    }
    const unsigned answer = feature.where == Register::kEbx ? ebx : feature.where == Register::kEcx ? ecx : edx;
    return (answer >> feature.bit & 1U) != 0 && (state & feature.os) == feature.os;
}

std::vector<std::string> find_features() {
    const std::uint32_t state = enabled_state();
    std::vector<std::string> found;
    for (const Feature& feature : kFeatures) {
        if (present(feature, state)) {
            found.emplace_back(feature.name);
        }
    }
    return found;
}

#else

std::vector<std::string> find_features() { return {}; }

#endif

Isa find_best_isa() {
    const std::vector<std::string> found = cpu_features();
    const auto has = [&found](const char* name) { return std::find(found.begin(), found.end(), name) != found.end(); };
    if (!has("avx2") || !has("fma") || !has("f16c")) {
        return Isa::kGeneric;
    }
    return has("avx512f") && has("avx512bw") && has("avx512dq") && has("avx512vl") && has("avx512_vnni") ? Isa::kAvx512
                                                                                                         : Isa::kAvx2;
}

}  // namespace

std::vector<std::string> cpu_features() {
    static const std::vector<std::string> found = find_features();
    return found;
}

Isa best_isa() {
    static const Isa best = find_best_isa();
    return best;
}

const char* isa_name(Isa isa) {
    switch (isa) {
        case Isa::kAvx512:
            return "avx512";
        case Isa::kAvx2:
            return "avx2";
        case Isa::kGeneric:
            break;
    }
    return "generic";
}

}  // namespace octavo
