// A register of floats, each of which belongs to a key or to a dimension.

#if defined(__AVX512VNNI__) && defined(__AVX512F__)

struct Lanes : Rows16 {
    static constexpr int kCount = 16;

    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static constexpr float kUnit = 1;  // of power
    static F times_power(F x, F n, F) { return _mm512_scalef_ps(x, n); }
    static float top(F x) { return top8(max8(eight(x, 0), eight(x, 1))); }
    static float sum(F x) { return sum8(add8(eight(x, 0), eight(x, 1))); }
    static F8 low(F x) { return eight(x, 0); }
    // The sums of every eighth lane, as registers of eight lanes add them up one after the other.
    static F8 add_eights(F8 sums, F x) { return add8(add8(sums, eight(x, 0)), eight(x, 1)); }
    static F either(F a, F b) { return _mm512_or_ps(a, b); }
    // x where a bit is set, y elsewhere.
    static F choose(std::uint32_t bits, F x, F y) { return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), y, x); }
    // Up to kCount, the rest zero.
    static F load_some(const float* p, std::int64_t count) {
        return count >= kCount ? load(p) : _mm512_maskz_loadu_ps(first_bits(count), p);
    }
    template <DType kType>
    static F widen(const char* p, std::int64_t count) {
        if constexpr (kType == DType::kF32) {
            return load_some(reinterpret_cast<const float*>(p), count);
        }
        if (count < kCount) {
            return _mm512_insertf32x8(zero(), load8_as<kType>(p), 0);
        }
        if constexpr (kType == DType::kF16) {
            return halves(reinterpret_cast<const std::uint8_t*>(p));
        } else if constexpr (kType == DType::kBF16) {
            const __m256i some = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
            return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(some), 16));
        } else if constexpr (kType == DType::kI8) {
            return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
        } else {
            const F low = _mm512_castps256_ps512(load8_as<kType>(p));
            return _mm512_insertf32x8(low, load8_as<kType>(p + 8 * kSize<kType>), 1);
        }
    }
    // Of two bfloat16, or of four int8, in each lane: the one at kPart.
    template <DType kType, int kPart>
    static F part(F words) {
        const __m512i bits = _mm512_castps_si512(words);
        constexpr int kBits = static_cast<int>(8 * kSize<kType>);
        const __m512i top = _mm512_slli_epi32(bits, 32 - kBits * (kPart + 1));
        if constexpr (kType == DType::kI8) {
            return _mm512_cvtepi32_ps(_mm512_srai_epi32(top, 24));
        }
        return kPart == 0 ? _mm512_castsi512_ps(top) : upper(words);
    }
    // The upper words of lanes.
    static F upper(F x) {
        return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(-65536)));
    }
    __attribute__((always_inline)) static void transpose(F (&x)[kCount]) {
        F y[kCount];
#pragma GCC unroll 4
        for (int i = 0; i < kCount; i += 4) {
            const F a = _mm512_unpacklo_ps(x[i], x[i + 1]), b = _mm512_unpacklo_ps(x[i + 2], x[i + 3]);
            const F c = _mm512_unpackhi_ps(x[i], x[i + 1]), d = _mm512_unpackhi_ps(x[i + 2], x[i + 3]);
            y[i] = _mm512_shuffle_ps(a, b, 0x44);
            y[i + 1] = _mm512_shuffle_ps(a, b, 0xee);
            y[i + 2] = _mm512_shuffle_ps(c, d, 0x44);
            y[i + 3] = _mm512_shuffle_ps(c, d, 0xee);
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const F a = _mm512_shuffle_f32x4(y[i], y[i + 4], 0x88), b = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0x88);
            const F c = _mm512_shuffle_f32x4(y[i], y[i + 4], 0xdd), d = _mm512_shuffle_f32x4(y[i + 8], y[i + 12], 0xdd);
            x[i] = _mm512_shuffle_f32x4(a, b, 0x88);
            x[i + 4] = _mm512_shuffle_f32x4(c, d, 0x88);
            x[i + 8] = _mm512_shuffle_f32x4(a, b, 0xdd);
            x[i + 12] = _mm512_shuffle_f32x4(c, d, 0xdd);
        }
    }

    // Lane i: the largest of x[i].
    __attribute__((always_inline)) static F tops(F (&x)[kCount]) {
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            x[i] = max(_mm512_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm512_unpackhi_ps(x[2 * i], x[2 * i + 1]));
        }
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            x[i] =
                max(_mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0x44), _mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0xee));
        }
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            x[i] = max(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x44),
                       _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xee));
        }
        return max(_mm512_shuffle_f32x4(x[0], x[1], 0x88), _mm512_shuffle_f32x4(x[0], x[1], 0xdd));
    }
    // Bit i: whether lane i of a is more than that of b.
    static std::uint32_t more(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }

  private:
    static __mmask16 first_bits(std::int64_t count) {
        return static_cast<__mmask16>(count > 0 ? (1U << count) - 1 : 0);
    }
};

#else

struct Lanes : Rows8 {
    static constexpr int kCount = 8;

    static F max(F a, F b) { return max8(a, b); }
    static constexpr float kUnit = 0.5F;  // of power
    static F times_power(F x, F, F shifted) { return mul8(x, exponent_of(shifted)); }
    static float top(F x) { return top8(x); }
    static float sum(F x) { return sum8(x); }
    static F8 low(F x) { return x; }
    static F8 add_eights(F8 sums, F x) { return add8(sums, x); }
    static F either(F a, F b) { return or8(a, b); }
    static F choose(std::uint32_t bits, F x, F y) { return choose8(bits, x, y); }
    static F load_some(const float* p, std::int64_t count) { return count >= kCount ? load(p) : load8_some(p, count); }
    template <DType kType>
    static F widen(const char* p, std::int64_t) {
        return load8_as<kType>(p);
    }
    template <DType kType, int kPart>
    static F part(F words) {
        return kType == DType::kI8 ? byte8<kPart>(words) : word8<kPart>(words);
    }
    __attribute__((always_inline)) static void transpose(F (&x)[kCount]) { transpose8(x); }
    __attribute__((always_inline)) static F tops(F (&x)[kCount]) { return tops8(x); }
    static std::uint32_t more(F a, F b) { return more8(a, b); }
};

#endif

// How many elements a lane holds while keys are turned, and are taken apart afterwards.
#if defined(__AVX2__)
template <DType kType>
constexpr int kParts = kType == DType::kBF16 ? 2
                       : kType == DType::kI8 ? 4
                                             : 1;
#else
template <DType kType>
constexpr int kParts = 1;
#endif

// A number that is added to it is rounded to a whole one, ties to even, and the lowest bits of the sum are the exponent
// of two to one more than that.
constexpr float kShift = 12582912.0F + 128.0F;

// 2^x of x <= 0, within 2 ulp; below -126 it is next to nothing. NaN stays NaN, as in exp8.
inline Lanes::F power(Lanes::F x) {
    const auto times = [](float number) { return Lanes::set(number * Lanes::kUnit); };
    const Lanes::F inside = Lanes::max(Lanes::set(-126.0F), x), shifted = Lanes::add(inside, Lanes::set(kShift));
    const Lanes::F n = Lanes::sub(shifted, Lanes::set(kShift)), r = Lanes::sub(inside, n);
    Lanes::F p = Lanes::fma(times(1.535336188e-4F), r, times(1.339887440e-3F));
    p = Lanes::fma(p, r, times(9.618437357e-3F));
    p = Lanes::fma(p, r, times(5.550332471e-2F));
    p = Lanes::fma(p, r, times(2.402264791e-1F));
    p = Lanes::fma(p, r, times(6.931472028e-1F));
    return Lanes::times_power(Lanes::fma(p, r, times(1.0F)), n, shifted);
}
