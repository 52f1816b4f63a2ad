#include "kernels.h"

#include <atomic>
#include <cstring>

namespace octavo {
namespace {

std::atomic<const Kernels*> selected{nullptr};

const Kernels* table(Isa isa) {
#ifdef OCTAVO_X86_KERNELS
    switch (isa) {
        case Isa::kAmx:
            return amx_kernels();
        case Isa::kAvx512Bf16:
            return avx512_bf16_kernels();
        case Isa::kAvx512:
            return avx512_kernels();
        case Isa::kAvx2:
            return avx2_kernels();
        default:
            break;
    }
#endif
    return isa == Isa::kEmulated ? emulated_kernels() : generic_kernels();
}

}  // namespace

const Kernels& kernels() {
    const Kernels* found = selected.load(std::memory_order_acquire);
    if (found == nullptr) {
        found = table(best_isa());
        selected.store(found, std::memory_order_release);
    }
    return *found;
}

void select_isa(const char* name) {
    for (const Isa isa : kIsas) {
        if (isa <= best_isa() && std::strcmp(name, isa_name(isa)) == 0) {
            selected.store(table(isa), std::memory_order_release);
            return;
        }
    }
    throw ArgumentError("isa", std::string(name) + " is not one this machine runs");
}

}  // namespace octavo
