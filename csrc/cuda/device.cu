#include "device.h"

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <iterator>
#include <string>

#include "arch/simt.h"
#include "common/fault.cuh"

namespace octavo::cuda {

int device_count() {
    int count = 0;
    const cudaError_t status = cudaGetDeviceCount(&count);
    if (status == cudaErrorInsufficientDriver || status == cudaErrorNoDevice) {
        return 0;
    }
    if (status != cudaSuccess) {
        throw DeviceError(std::string("devices: ") + cudaGetErrorString(status));
    }
    return count;
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
        const cudaError_t status = cudaHostAlloc(&memory, sizeof(std::int32_t), cudaHostAllocPortable);
        if (status != cudaSuccess) {
            throw DeviceError(std::string("memory for faults: ") + cudaGetErrorString(status));
        }
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
