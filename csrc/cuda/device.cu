#include "device.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <sstream>
#include <string>
#include <utility>

#include "arch/simt.h"
#include "common/fault.cuh"

#ifndef OCTAVO_CUDA_ARCHITECTURES
#error "says for which architectures the kernels are compiled: as CMake has them, with commas between them"
#endif

namespace octavo::cuda {
namespace {

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "device");
    return value;
}

// As people write them: 8.6, 12.4.
std::string text_of(int major, int minor) { return std::to_string(major) + "." + std::to_string(minor); }
std::string version_text(int version) { return text_of(version / 1000, version % 1000 / 10); }

enum class KernelState {
    kNone,          // that runs on the device
    kMadeByDriver,  // of PTX, when a kernel is first launched
    kThere
};

// Machine code runs on devices of the same major version and of no lower minor version; PTX, on all that are not older.
// With an `a`, both run on that very capability alone. -real is machine code alone, -virtual PTX alone.
// The second is the capability that the kernels were made for.
std::pair<KernelState, int> kernels_on(int capability) {
    std::pair<KernelState, int> found{KernelState::kNone, 0};
    std::istringstream all(OCTAVO_CUDA_ARCHITECTURES);
    for (std::string one; std::getline(all, one, ',');) {
        const std::size_t dash = std::min(one.find('-'), one.size());
        const std::string name = one.substr(0, dash), kind = one.substr(dash);
        const int number = std::stoi(name);
        const bool alone = name.back() == 'a', later = alone ? capability == number : capability >= number;
        const bool there = kind != "-virtual" && later && capability / 10 == number / 10;
        if (there || (kind != "-real" && later)) {
            found = std::max(found, {there ? KernelState::kThere : KernelState::kMadeByDriver, number});
        }
    }
    return found;
}

int capability_of(int device) {
    return 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
           attribute(cudaDevAttrComputeCapabilityMinor, device);
}

}  // namespace

int device_count() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice) {
        cudaGetLastError();
        return 0;
    }
    check(status, "devices");
    return count;
}

std::string unsupported(int device) {
    int driver = 0, count = 0;
    check(cudaDriverGetVersion(&driver), "driver");
    const std::string old_driver = "the driver is for CUDA " + version_text(driver) + ", older than the " +
                                   version_text(CUDART_VERSION) + " that the kernels were built with";
    if (cudaGetDeviceCount(&count) != cudaSuccess) {
        cudaGetLastError();
        return driver == 0 || driver >= CUDART_VERSION ? "" : old_driver;
    }
    if (device >= count) {
        return "";
    }
    const int capability = capability_of(device);
    const std::string name =
        "device " + std::to_string(device) + " has compute capability " + text_of(capability / 10, capability % 10);
    switch (kernels_on(capability).first) {
        case KernelState::kThere:
            return "";
        case KernelState::kMadeByDriver:
            return driver >= CUDART_VERSION ? ""
                                            : name + ", for which the driver has to compile them, but " + old_driver;
        default:
            return name + ", which is too old: the kernels were built for " OCTAVO_CUDA_ARCHITECTURES;
    }
}

bool multiplies_fp8(int device) { return CUDART_VERSION >= 12040 && kernels_on(capability_of(device)).second >= 89; }

bool fits_shared(std::size_t bytes) {
    constexpr std::size_t kEverywhere = 48 * 1024;
    if (bytes <= kEverywhere) {
        return true;
    }
    int device = 0;
    check(cudaGetDevice(&device), "device");
    return bytes <= static_cast<std::size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
}

const char* device_problem(const void* address) {
    if (address == nullptr) {
        return nullptr;
    }
    // A device's memory is given out in pieces of 2 MB: the driver is asked once for each, since it takes its time.
    static std::array<std::uint64_t, 4096> known{};
    int current = 0;
    if (cudaGetDevice(&current) != cudaSuccess) {
        cudaGetLastError();  // a launch later must not find it
        return "cannot be used: there is no CUDA device";
    }
    const std::uint64_t piece = reinterpret_cast<std::uintptr_t>(address) >> 21;
    std::uint64_t& mine = known[piece % known.size()];
    const std::uint64_t name = piece << 8 | static_cast<std::uint64_t>(current + 1);
    if (mine == name) {
        return nullptr;
    }
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
        cudaGetLastError();
        return "cannot be looked up";
    }
    switch (attributes.type) {
        case cudaMemoryTypeUnregistered:
            return "is in the host's memory, not on the CUDA device";
        case cudaMemoryTypeDevice:
            if (attributes.device != current) {
                return "is on another CUDA device than the current one";
            }
            mine = name;
            return nullptr;
        default:  // pinned or managed
            return nullptr;
    }
}

FaultWord fault_word() {
    static const FaultWord word = [] {
        void* memory = nullptr;
        check(cudaHostAlloc(&memory, sizeof(std::int32_t), cudaHostAllocPortable), "memory for faults");
        auto* made = static_cast<FaultWord>(memory);
        *made = 0;
        return made;
    }();
    return word;
}

const char* take_fault() {
    static constexpr const char* kTexts[] = {
        // as Fault counts
        nullptr,
        "block_tables: named a block that is not there",
        "cu_q: had queries that are not there, or other ones than the plan",
        "seq_lens: had a length that is negative or more than block_tables has room for",
        "plan: had an item that cannot be one of this batch",
        "slot_mapping: named a slot past the last block",
        "positions: named a row that cos and sin do not have",
        "ids: named a block that is not there",
        "pairs: named a block that is not there",
        "offsets: named entries that are not there"};
    volatile std::int32_t* word = fault_word();
    const auto fault = static_cast<std::size_t>(*word);
    *word = 0;
    return fault < std::size(kTexts) ? kTexts[fault] : "faults: one that has no name";
}

}  // namespace octavo::cuda
