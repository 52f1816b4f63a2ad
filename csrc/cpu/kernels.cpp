#include "kernels.h"

#include <atomic>
#include <cstring>
#include <vector>

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

// A processor or a hypervisor that is wrong about tiles must cost speed, not tokens.
const Kernels* best_table() {
#ifdef OCTAVO_X86_KERNELS
    if (best_isa() == Isa::kAmx && !agree(*amx_kernels(), *avx512_bf16_kernels())) {
        return avx512_bf16_kernels();
    }
#endif
    return table(best_isa());
}

}  // namespace

const Kernels& kernels() {
    const Kernels* found = selected.load(std::memory_order_acquire);
    if (found == nullptr) {
        found = best_table();
        selected.store(found, std::memory_order_release);
    }
    return *found;
}

const Kernels& kernels_named(const char* name) {
    for (const Isa isa : kIsas) {
        if (isa <= best_isa() && std::strcmp(name, isa_name(isa)) == 0) {
            return *table(isa);
        }
    }
    throw ArgumentError("isa", std::string(name) + " is not one this machine runs");
}

void select_isa(const char* name) { selected.store(&kernels_named(name), std::memory_order_release); }

bool agree(const Kernels& one, const Kernels& other) {
    constexpr std::int64_t kColumns = kInputColumns + 1, kRows = 2 * kGroupRows, kCols = 2 * kBlock;
    std::vector<float> x(kColumns * kCols);
    for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] = static_cast<float>(static_cast<int>(i * 7 % 31) - 15);
    }
    std::vector<std::uint8_t> numbers(kRows * kCols * 3);
    for (std::size_t i = 0; i < numbers.size(); i += 2) {  // as bfloat16 powers of two, as float16 small numbers
        const auto half = static_cast<std::uint16_t>(0x3c00 + i % 5 * 0x80);
        std::memcpy(numbers.data() + i, &half, 2);
    }
    std::vector<InputBlock> digits(2 * kInputColumns * kCols / kBlock);
    std::vector<HalfBlock> halves(digits.size());
    for (std::int64_t c = 0; c < kColumns; ++c) {
        one.to_digits(x.data() + c * kCols, kCols, digits.data() + input_at(c, kCols / kBlock));
        one.to_halves(x.data() + c * kCols, kCols, halves.data() + input_at(c, kCols / kBlock));
    }
    for (const Format format : {Format::kHalves, Format::kQ8, Format::kQ4, Format::kQ4Mins}) {
        const Weight weight{format, numbers.data(), kRows, kCols, 0, false};
        std::vector<float> results[2];
        for (int i = 0; i < 2; ++i) {
            results[i].resize(kColumns * kRows);
            const LinearJob job{weight,   x.data(),          kCols, digits.data(), halves.data(),
                                kColumns, results[i].data(), kRows, nullptr,       false};
            (i == 0 ? one : other).linear(job, 0, kRows, nullptr);
        }
        if (results[0] != results[1]) {
            return false;
        }
    }
    return true;
}

}  // namespace octavo
