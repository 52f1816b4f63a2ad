// Eight floats at a time (F8), and the dot product of eight rows with one block of inputs. Each translation unit of an
// instruction set includes this file in its anonymous namespace.

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNotANumber = std::numeric_limits<float>::quiet_NaN();

// The numbers of codes, as products with unsigned bytes take them: larger by the format's offset.
struct alignas(16) CodeTable {
    std::uint8_t numbers[16] = {};
};
template <Format kFormat>
constexpr CodeTable make_code_table() {
    CodeTable table;
    for (int code = 0; code < 16; ++code) {
        const int number = shape_of(kFormat).codes[code] + static_cast<int>(offset_of(kFormat));
        table.numbers[code] = static_cast<std::uint8_t>(number);
    }
    return table;
}
template <Format kFormat>
constexpr CodeTable kUnsignedCodes = make_code_table<kFormat>();

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "simd/floats_avx2.inl"

#include "simd/blocks_avx2.inl"

#else

#include "simd/floats_generic.inl"

#include "simd/blocks_generic.inl"

#endif

// Up to eight, the rest zero.
inline F8 load8_some(const float* p, std::int64_t count) {
    float wide[8] = {};
    for (std::int64_t i = 0; i < count; ++i) {
        wide[i] = p[i];
    }
    return load8(wide);
}

// e^x, within 2 ulp; below -87.3 next to nothing, above 88.3 infinity. NaN stays NaN: min8 and max8 give their second
// operand then.
inline F8 exp8(F8 x) {
    const F8 low = set8(-87.33654F);
    const F8 inside = max8(low, min8(set8(89.0F), x));
    const F8 n = round8(mul8(inside, set8(1.44269504F)));
    F8 r = fma8(n, set8(-0.693359375F), inside);
    r = fma8(n, set8(2.12194440e-4F), r);
    F8 p = fma8(set8(1.9875691500e-4F), r, set8(1.3981999507e-3F));
    p = fma8(p, r, set8(8.3334519073e-3F));
    p = fma8(p, r, set8(4.1665795894e-2F));
    p = fma8(p, r, set8(1.6666665459e-1F));
    p = fma8(p, r, set8(5.0000001201e-1F));
    p = add8(fma8(p, mul8(r, r), r), set8(1.0F));
    return mul8(p, exponent8(n));
}
