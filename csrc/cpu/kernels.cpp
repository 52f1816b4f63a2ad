#include "kernels.h"

#include <atomic>
#include <cstring>
#include <vector>

namespace octavo {
namespace {

std::atomic<const Kernels*> selected{nullptr};

struct Table {
    Isa isa;
    const Kernels* (*get)();
};

// Those that this build has (OCTAVO_ISAS), the best one last.
constexpr Table kTables[] = {
#ifdef OCTAVO_HAS_EMULATED
    {Isa::kEmulated, emulated_kernels},
#endif
#ifdef OCTAVO_HAS_GENERIC
    {Isa::kGeneric, generic_kernels},
#endif
#ifdef OCTAVO_HAS_AVX2
    {Isa::kAvx2, avx2_kernels},
#endif
#ifdef OCTAVO_HAS_AVX512
    {Isa::kAvx512, avx512_kernels},
#endif
#ifdef OCTAVO_HAS_AVX512_BF16
    {Isa::kAvx512Bf16, avx512_bf16_kernels},
#endif
#ifdef OCTAVO_HAS_AMX
    {Isa::kAmx, amx_kernels},
#endif
};

const Kernels* best_table() {
    const Kernels* best = nullptr;
    for (const Table& table : kTables) {
        if (table.isa > best_isa() || table.isa == Isa::kEmulated) {
            continue;
        }
        if (best != nullptr && best->isa == Isa::kAvx512 && !is_fast(table.isa)) {
            continue;
        }
        const Kernels* found = table.get();
        // A processor or a hypervisor that is wrong about tiles must cost speed, not tokens.
        if (table.isa != Isa::kAmx || agree(*found, *best)) {
            best = found;
        }
    }
    require(best != nullptr, "isa", "none that this machine runs was built: make extension ISAS=native");
    return best;
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

std::vector<Isa> usable_isas() {
    std::vector<Isa> found;
    for (const Table& table : kTables) {
        if (runs(table.isa)) {
            found.push_back(table.isa);
        }
    }
    return found;
}

const Kernels& kernels_named(const char* name) {
    for (const Table& table : kTables) {
        if (runs(table.isa) && std::strcmp(name, isa_name(table.isa)) == 0) {
            return *table.get();
        }
    }
    for (const Isa isa : kIsas) {
        if (runs(isa) && std::strcmp(name, isa_name(isa)) == 0) {
            const char* wanted = isa == Isa::kEmulated ? "tests" : "all";
            throw ArgumentError("isa", std::string(name) + " was not built: make extension ISAS=" + wanted);
        }
    }
    throw ArgumentError("isa", std::string(name) + " is not one this machine runs");
}

void select_isa(const char* name) { selected.store(&kernels_named(name), std::memory_order_release); }

bool agree(const Kernels& one, const Kernels& other) {
    constexpr std::int64_t kColumns = kInputColumns + 1, kRows = 2 * kGroupRows, kCols = kSuperblock;
    std::vector<float> x(kColumns * kCols);
    for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] = static_cast<float>(static_cast<int>(i * 7 % 31) - 15);
    }
    std::vector<std::uint8_t> numbers(kRows * kCols * 3);
    for (std::size_t i = 0; i < numbers.size(); i += 2) {  // as bfloat16 powers of two, as float16 small numbers
        const auto scale16 = static_cast<std::uint16_t>(0x3c00 + i % 5 * 0x80);
        std::memcpy(numbers.data() + i, &scale16, 2);
    }
    std::vector<InputBlock> digits(2 * kInputColumns * kCols / kBlock);
    std::vector<Bf16Block> bf16(digits.size());
    for (const Rounding rounding :
         {Rounding::k15Bits, Rounding::k8Bits, Rounding::kBf16, Rounding::kToken15Bits, Rounding::kToken8Bits}) {
        for (std::int64_t c = 0; c < kColumns && rounding != Rounding::kBf16; ++c) {
            one.to_digits(x.data() + c * kCols, kCols, rounding, digits.data() + input_at(c, kCols / kBlock));
        }
        for (std::int64_t c = 0; c < kColumns && rounding == Rounding::kBf16; ++c) {
            one.to_bf16_blocks(x.data() + c * kCols, kCols, bf16.data() + input_at(c, kCols / kBlock));
        }
        for (int i = static_cast<int>(Format::kQ8); i < kNumFormats; ++i) {
            const auto format = static_cast<Format>(i);
            if (!takes(format, rounding)) {
                continue;
            }
            std::vector<float> results[2];
            for (int side = 0; side < 2; ++side) {
                results[side].resize(kColumns * kRows);
                const Weight weight{format, numbers.data(), kRows, kCols, 0, rounding};
                const LinearJob job{weight, x.data(), kCols, digits.data(), bf16.data(), kColumns, results[side].data(),
                                    kRows,  nullptr,  false};
                const Kernels& kernels = side == 0 ? one : other;
                std::vector<float> scratch(static_cast<std::size_t>(kernels.linear_scratch(job)));
                kernels.linear(job, 0, kRows, scratch.data());
            }
            if (results[0] != results[1]) {
                return false;
            }
        }
    }
    return true;
}

}  // namespace octavo
