// The body of every isa_*.cpp, which defines OCTAVO_ISA and OCTAVO_TABLE and is compiled for its instruction set.
// Everything is in an anonymous namespace, and no inline function of the standard library is called: where such a
// function is not inlined, the linker keeps one copy of it for all files, and that may be the copy for AVX2.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "half.h"
#include "kernels.h"

namespace octavo {
namespace {

#include "simd.inl"

#include "rows.inl"

#if defined(OCTAVO_TILES)
#include "simd/tiles.inl"
#endif

#include "elementwise.inl"

#include "kv_rows.inl"

#include "low_rank.inl"

#include "linear_packed.inl"

#include "linear_panels.inl"

#include "linear_digits.inl"

#include "linear_rows.inl"

#include "linear_bf16.inl"

#include "linear_dense.inl"

#include "recurrence.inl"

#include "attention.inl"

}  // namespace

const Kernels* OCTAVO_TABLE() {
    static constexpr Kernels kTable = {
        OCTAVO_ISA,     linear,         linear_scratch, division, to_digits,  to_bf16_blocks, weight_row,
        attend,         attend_scratch, merge,          rms_norm, layer_norm, activate,       silu_mul,
        clamped_swiglu, write_slot,     rotate,         to_float, from_float, argmax,         adds_low_rank,
        add_low_rank,   recur,          recur_lines,    scan,     convolve,   sigmoid_mul,    fade,
    };
    return &kTable;
}

}  // namespace octavo
