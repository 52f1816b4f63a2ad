// Eight floats in one register of AVX2.

using F8 = __m256;

inline F8 zero8() { return _mm256_setzero_ps(); }
inline F8 set8(float x) { return _mm256_set1_ps(x); }
inline F8 load8(const float* p) { return _mm256_loadu_ps(p); }
inline void store8(float* p, F8 x) { _mm256_storeu_ps(p, x); }
inline F8 add8(F8 a, F8 b) { return _mm256_add_ps(a, b); }
inline F8 sub8(F8 a, F8 b) { return _mm256_sub_ps(a, b); }
inline F8 mul8(F8 a, F8 b) { return _mm256_mul_ps(a, b); }
inline F8 div8(F8 a, F8 b) { return _mm256_div_ps(a, b); }
inline F8 max8(F8 a, F8 b) { return _mm256_max_ps(a, b); }
inline F8 min8(F8 a, F8 b) { return _mm256_min_ps(a, b); }
inline F8 fma8(F8 a, F8 b, F8 c) { return _mm256_fmadd_ps(a, b, c); }
inline F8 or8(F8 a, F8 b) { return _mm256_or_ps(a, b); }
inline F8 abs8(F8 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), a); }
inline F8 round8(F8 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Bit i: whether a and b have the same element i.
inline std::uint32_t same8(F8 a, F8 b) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
}
// Bit i: whether element i of a is more than that of b.
inline std::uint32_t more8(F8 a, F8 b) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
}
// 2^a for whole a in [-126, 127]
inline F8 exponent8(F8 a) {
    const __m256i n = _mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}
// The lowest bits of each number, as an exponent.
inline F8 exponent_of(F8 a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23)); }

inline F8 load8_f16(const std::uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline F8 load8_bf16(const std::uint16_t* p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
inline F8 load8_i8(const char* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline F8 load8_e5m2(const char* p) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), bytes));
}
// Divided by kE4M3Factor.
inline F8 load8_e4m3(const char* p) {
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xbf80)));
    const __m128i size = _mm_and_si128(half, _mm_set1_epi16(0x3f80));
    const __m128i nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x3f80));
    return _mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(nan, _mm_set1_epi16(0x7e00))));
}
inline void store8_f16(std::uint16_t* p, F8 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
}
inline void store8_bf16(std::uint16_t* p, F8 x) {
    const __m256i bits = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), one);
    const __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(_mm256_set1_epi32(0x7fff), odd));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(up, quiet, nan), 16);
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

inline float sum8(F8 x) {
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
}
inline float top8(F8 x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}

// Of the two bfloat16 or the four int8 of each word, the one at kPart.
template <int kPart>
inline F8 word8(F8 words) {
    const __m256i bits = _mm256_castps_si256(words);
    return _mm256_castsi256_ps(kPart == 0 ? _mm256_slli_epi32(bits, 16)
                                          : _mm256_and_si256(bits, _mm256_set1_epi32(-65536)));
}
template <int kPart>
inline F8 byte8(F8 words) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(_mm256_castps_si256(words), 24 - 8 * kPart), 24));
}

// a where a bit is set, b elsewhere.
inline F8 choose8(std::uint32_t bits, F8 a, F8 b) {
    const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i set = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), each);
    return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, each)));
}

// Rows become columns.
__attribute__((always_inline)) inline void transpose8(F8 (&x)[8]) {
    F8 y[8];
    for (int i = 0; i < 8; i += 4) {
        const F8 a = _mm256_unpacklo_ps(x[i], x[i + 1]), b = _mm256_unpacklo_ps(x[i + 2], x[i + 3]);
        const F8 c = _mm256_unpackhi_ps(x[i], x[i + 1]), d = _mm256_unpackhi_ps(x[i + 2], x[i + 3]);
        y[i] = _mm256_shuffle_ps(a, b, 0x44);
        y[i + 1] = _mm256_shuffle_ps(a, b, 0xee);
        y[i + 2] = _mm256_shuffle_ps(c, d, 0x44);
        y[i + 3] = _mm256_shuffle_ps(c, d, 0xee);
    }
    for (int i = 0; i < 4; ++i) {
        x[i] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x20);
        x[i + 4] = _mm256_permute2f128_ps(y[i], y[i + 4], 0x31);
    }
}

// Element i: the largest of x[i].
__attribute__((always_inline)) inline F8 tops8(F8 (&x)[8]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        x[i] = max8(_mm256_unpacklo_ps(x[2 * i], x[2 * i + 1]), _mm256_unpackhi_ps(x[2 * i], x[2 * i + 1]));
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
        x[i] = max8(_mm256_shuffle_ps(x[2 * i], x[2 * i + 1], 0x44), _mm256_shuffle_ps(x[2 * i], x[2 * i + 1], 0xee));
    }
    return max8(_mm256_permute2f128_ps(x[0], x[1], 0x20), _mm256_permute2f128_ps(x[0], x[1], 0x31));
}

// Into the first cache, and into the second. As calls they would have no effect that the compiler sees, and vanish.
__attribute__((always_inline)) inline void fetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
__attribute__((always_inline)) inline void fetch_second(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}
