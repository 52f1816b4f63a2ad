#include "kernels.h"

#include <atomic>
#include <cstring>

namespace octavo {
namespace {

std::atomic<const Kernels*> selected{nullptr};

const Kernels* table(Isa isa) {
#ifdef OCTAVO_X86_KERNELS
    if (isa == Isa::kAvx512) {
        return avx512_kernels();
    }
    if (isa == Isa::kAvx2) {
        return avx2_kernels();
    }
#endif
    static_cast<void>(isa);
    return generic_kernels();
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
    for (const Isa isa : {Isa::kGeneric, Isa::kAvx2, Isa::kAvx512}) {
        if (isa <= best_isa() && std::strcmp(name, isa_name(isa)) == 0) {
            selected.store(table(isa), std::memory_order_release);
            return;
        }
    }
    throw ArgumentError("isa", std::string(name) + " is not one this machine runs");
}

}  // namespace octavo
