#include "octavo/isa.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#define OCTAVO_X86 1
#endif

namespace octavo {
namespace {

#ifdef OCTAVO_X86

enum class Register { kEax, kEbx, kEcx, kEdx };

// What must be saved on a context switch for the registers to be usable: bits of XCR0.
constexpr std::uint32_t kYmmState = 0x06;      // SSE and AVX
constexpr std::uint32_t kZmmState = 0xe6;      // and opmask, upper ZMM0-15, ZMM16-31
constexpr std::uint32_t kTileState = 0x60000;  // the configuration of tiles, and their data

struct Feature {
    const char* name;
    unsigned leaf;     // of cpuid
    unsigned subleaf;  // of the leaf
    Register where;    // the register of the answer
    unsigned bit;      // in it
    std::uint32_t os;  // bits of XCR0 that must be set
};

constexpr Feature kFeatures[] = {
    {"avx2", 7, 0, Register::kEbx, 5, kYmmState},        {"fma", 1, 0, Register::kEcx, 12, kYmmState},
    {"f16c", 1, 0, Register::kEcx, 29, kYmmState},       {"avx512f", 7, 0, Register::kEbx, 16, kZmmState},
    {"avx512dq", 7, 0, Register::kEbx, 17, kZmmState},   {"avx512bw", 7, 0, Register::kEbx, 30, kZmmState},
    {"avx512vl", 7, 0, Register::kEbx, 31, kZmmState},   {"avx512_vnni", 7, 0, Register::kEcx, 11, kZmmState},
    {"avx512_bf16", 7, 1, Register::kEax, 5, kZmmState}, {"amx_tile", 7, 0, Register::kEdx, 24, kTileState},
    {"amx_int8", 7, 0, Register::kEdx, 25, kTileState},  {"amx_bf16", 7, 0, Register::kEdx, 22, kTileState},
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
    if (__get_cpuid_count(feature.leaf, feature.subleaf, &eax, &ebx, &ecx, &edx) == 0) {
        return false;
    }
    const unsigned answers[] = {eax, ebx, ecx, edx};
    return (answers[static_cast<int>(feature.where)] >> feature.bit & 1U) != 0 && (state & feature.os) == feature.os;
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

bool is_intel() {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    constexpr unsigned kGenu = 0x756e6547;  // of GenuineIntel
    return __get_cpuid(0, &eax, &ebx, &ecx, &edx) != 0 && ebx == kGenu;
}

#else

std::vector<std::string> find_features() { return {}; }
bool is_intel() { return false; }

#endif

// Tiles hold 8 KiB that a context switch saves only for processes that have asked for them.
bool may_use_tiles() {
#if defined(SYS_arch_prctl)
    constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

Isa find_highest_isa() {
    const std::vector<std::string> found = cpu_features();
    const auto has = [&found](std::initializer_list<const char*> names) {
        return std::all_of(names.begin(), names.end(), [&found](const char* name) {
            return std::find(found.begin(), found.end(), name) != found.end();
        });
    };
    if (!has({"avx2", "fma", "f16c"})) {
        return Isa::kGeneric;
    }
    if (!has({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"})) {
        return Isa::kAvx2;
    }
    if (!has({"avx512_bf16"})) {
        return Isa::kAvx512;
    }
    return has({"amx_tile", "amx_bf16", "amx_int8"}) && may_use_tiles() ? Isa::kAmx : Isa::kAvx512Bf16;
}

Isa highest_isa() {
    static const Isa highest = find_highest_isa();
    return highest;
}

}  // namespace

std::vector<std::string> cpu_features() {
    static const std::vector<std::string> found = find_features();
    return found;
}

Isa best_isa() {
    return highest_isa() == Isa::kAvx512Bf16 && !is_fast(Isa::kAvx512Bf16) ? Isa::kAvx512 : highest_isa();
}

bool is_fast(Isa isa) {
    // Intel's processors begin vdpbf16ps every second cycle on one port: with products of floats, on two ports, they
    // are faster.
    static const bool intel = is_intel();
    return isa != Isa::kAvx512Bf16 || !intel;
}

bool runs(Isa isa) { return isa <= highest_isa(); }

const char* isa_name(Isa isa) {
    constexpr const char* kNames[] = {"emulated", "generic", "avx2", "avx512", "avx512_bf16", "amx"};
    return kNames[static_cast<int>(isa)];
}

}  // namespace octavo
