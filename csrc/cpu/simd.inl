// Eight floats at a time, and the dot product of eight rows with one block of inputs. Included by one translation unit
// per instruction set, inside its anonymous namespace.

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

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
inline F8 abs8(F8 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), a); }
inline F8 round8(F8 a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// Bit i: whether a and b have the same element i.
inline std::uint32_t same8(F8 a, F8 b) {
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ)));
}
// 2^a for whole a in [-126, 127]
inline F8 exponent8(F8 a) {
    const __m256i n = _mm256_add_epi32(_mm256_cvtps_epi32(a), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
}

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
// The sums of eight registers, one per lane.
inline F8 sums8(const F8* x) {
    const F8 a = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    const F8 b = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// Sums of neighbours, within halves: a0 + a1, a2 + a3, b0 + b1, b2 + b3, then the same of the upper halves.
inline F8 pairs8(F8 a, F8 b) { return _mm256_hadd_ps(a, b); }
// Lower half plus upper half: of a, then of b.
inline F8 halves8(F8 a, F8 b) {
    return _mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31));
}

// Into the first cache, and into the second. As calls they would have no effect that the compiler sees, and vanish.
__attribute__((always_inline)) inline void fetch(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
__attribute__((always_inline)) inline void fetch_second(const void* p) {
    _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

// A 4-bit block of eight of a group's sixteen rows, as eight pieces of unsigned bytes.
struct Nibbles {
    __m256i piece[8];
};
inline Nibbles nibbles_of(const std::uint8_t* p) {
    Nibbles n;
    const __m256i mask = _mm256_set1_epi8(15);
    for (int i = 0; i < 4; ++i) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * i));
        n.piece[i] = _mm256_and_si256(bytes, mask);
        n.piece[i + 4] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
    }
    return n;
}
inline __m256i four(const std::int8_t* a) {
    std::int32_t bytes;
    std::memcpy(&bytes, a, 4);
    return _mm256_set1_epi32(bytes);
}

// Sums of pairs stay below 2 * 15 * 127 = 3810, so eight of them fit 16 bits.
inline F8 dot_nibbles(const Nibbles& n, const std::int8_t* a) {
    __m256i sum = _mm256_maddubs_epi16(n.piece[0], four(a));
    for (int i = 1; i < 8; ++i) {
        sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(n.piece[i], four(a + 4 * i)));
    }
    return _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1)));
}

struct Bytes {
    __m256i piece[8];  // signed
};
inline Bytes bytes_of(const std::uint8_t* p) {
    Bytes b;
    for (int i = 0; i < 8; ++i) {
        const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * i));
        b.piece[i] = _mm256_xor_si256(raw, _mm256_set1_epi8(-128));
    }
    return b;
}
// |b| * (a with b's sign): pairs stay below 2 * 128 * 127, within 16 bits, but no two of them would.
inline F8 dot_bytes(const Bytes& b, const std::int8_t* a) {
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < 8; ++i) {
        const __m256i pairs =
            _mm256_maddubs_epi16(_mm256_abs_epi8(b.piece[i]), _mm256_sign_epi8(four(a + 4 * i), b.piece[i]));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return _mm256_cvtepi32_ps(sum);
}

// Byte (shift / 8) of each 32-bit lane, its low `mask` bits, as floats.
struct Words {
    __m256i v;
};
inline Words words_of(const std::uint8_t* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
inline F8 pick_of(Words w, std::uint32_t shift, int mask) {
    const __m256i shifted = _mm256_srlv_epi32(w.v, _mm256_set1_epi32(static_cast<int>(shift)));
    return _mm256_cvtepi32_ps(_mm256_and_si256(shifted, _mm256_set1_epi32(mask)));
}

// 32 floats in [-127, 127] to int8; returns their sum.
inline std::int32_t store32_i8(std::int8_t* p, const F8* x) {
    const __m256i a = _mm256_cvtps_epi32(x[0]), b = _mm256_cvtps_epi32(x[1]);
    const __m256i c = _mm256_cvtps_epi32(x[2]), d = _mm256_cvtps_epi32(x[3]);
    const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    const __m256i in_order = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), in_order);
    const __m256i sums = _mm256_add_epi32(_mm256_add_epi32(a, b), _mm256_add_epi32(c, d));
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1)));
}

#else

struct F8 {
    float v[8];
};

template <typename Op>
inline F8 each8(Op op) {
    F8 r;
    for (int i = 0; i < 8; ++i) {
        r.v[i] = op(i);
    }
    return r;
}
inline F8 set8(float x) {
    return each8([&](int) { return x; });
}
inline F8 zero8() { return set8(0); }
inline F8 load8(const float* p) {
    return each8([&](int i) { return p[i]; });
}
inline void store8(float* p, F8 x) { std::memcpy(p, x.v, sizeof x.v); }
inline F8 add8(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] + b.v[i]; });
}
inline F8 sub8(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] - b.v[i]; });
}
inline F8 mul8(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] * b.v[i]; });
}
inline F8 div8(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] / b.v[i]; });
}
inline F8 max8(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F8 min8(F8 a, F8 b) {
    return each8([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline F8 fma8(F8 a, F8 b, F8 c) {
    return each8([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
inline F8 abs8(F8 a) {
    return each8([&](int i) { return std::fabs(a.v[i]); });
}
inline F8 round8(F8 a) {
    return each8([&](int i) { return std::nearbyintf(a.v[i]); });
}
inline std::uint32_t same8(F8 a, F8 b) {
    std::uint32_t bits = 0;
    for (unsigned i = 0; i < 8; ++i) {
        bits |= static_cast<std::uint32_t>(a.v[i] == b.v[i]) << i;
    }
    return bits;
}
inline F8 exponent8(F8 a) {
    return each8([&](int i) {
        const int n = a.v[i] == a.v[i] ? static_cast<int>(a.v[i]) : 0;
        return float_of(static_cast<std::uint32_t>(n + 127) << 23);
    });
}
inline F8 load8_f16(const std::uint16_t* p) {
    return each8([&](int i) { return half_to_float(p[i]); });
}
inline F8 load8_bf16(const std::uint16_t* p) {
    return each8([&](int i) { return bf16_to_float(p[i]); });
}
inline F8 load8_i8(const char* p) {
    return each8([&](int i) { return static_cast<float>(static_cast<std::int8_t>(p[i])); });
}
inline F8 load8_e5m2(const char* p) {
    return each8([&](int i) { return e5m2_to_float(static_cast<std::uint8_t>(p[i])); });
}
inline F8 load8_e4m3(const char* p) {
    return each8([&](int i) { return e4m3_to_float(static_cast<std::uint8_t>(p[i])) * (1.0F / kE4M3Factor); });
}
inline F8 pairs8(F8 a, F8 b) {
    return each8([&](int i) {
        const float* x = i & 2 ? b.v : a.v;
        return x[(i & 4) + 2 * (i & 1)] + x[(i & 4) + 2 * (i & 1) + 1];
    });
}
inline F8 halves8(F8 a, F8 b) {
    return each8([&](int i) {
        const float* x = i & 4 ? b.v : a.v;
        return x[i & 3] + x[(i & 3) + 4];
    });
}
inline void store8_f16(std::uint16_t* p, F8 x) {
    for (int i = 0; i < 8; ++i) {
        p[i] = float_to_half(x.v[i]);
    }
}
inline float sum8(F8 x) { return ((x.v[0] + x.v[4]) + (x.v[2] + x.v[6])) + ((x.v[1] + x.v[5]) + (x.v[3] + x.v[7])); }
inline float top8(F8 x) {
    float top = x.v[0];
    for (int i = 1; i < 8; ++i) {
        top = x.v[i] > top ? x.v[i] : top;
    }
    return top;
}
inline F8 sums8(const F8* x) {
    return each8([&](int i) { return sum8(x[i]); });
}
inline void fetch(const void*) {}
inline void fetch_second(const void*) {}

struct Nibbles {
    const std::uint8_t* p;
};
inline Nibbles nibbles_of(const std::uint8_t* p) { return {p}; }
inline F8 dot_nibbles(const Nibbles& n, const std::int8_t* a) {
    return each8([&](int row) {
        std::int32_t sum = 0;
        for (int k = 0; k < 16; ++k) {
            const int byte = n.p[k / 4 * 64 + row * 4 + k % 4];
            sum += (byte & 15) * a[k] + (byte >> 4) * a[k + 16];
        }
        return static_cast<float>(sum);
    });
}
using Bytes = Nibbles;
inline Bytes bytes_of(const std::uint8_t* p) { return {p}; }
inline F8 dot_bytes(const Bytes& b, const std::int8_t* a) {
    return each8([&](int row) {
        std::int32_t sum = 0;
        for (int k = 0; k < 32; ++k) {
            sum += (b.p[k / 4 * 64 + row * 4 + k % 4] - 128) * a[k];
        }
        return static_cast<float>(sum);
    });
}
struct Words {
    const std::uint8_t* p;
};
inline Words words_of(const std::uint8_t* p) { return {p}; }
inline F8 pick_of(Words w, std::uint32_t shift, int mask) {
    return each8([&](int i) { return static_cast<float>(w.p[4 * i + shift / 8] >> shift % 8 & mask); });
}
inline std::int32_t store32_i8(std::int8_t* p, const F8* x) {
    std::int32_t sum = 0;
    for (int i = 0; i < 32; ++i) {
        p[i] = static_cast<std::int8_t>(std::nearbyintf(x[i / 8].v[i % 8]));
        sum += p[i];
    }
    return sum;
}

#endif

inline void store8_bf16(std::uint16_t* p, F8 x) {
    float wide[8];
    store8(wide, x);
    for (int i = 0; i < 8; ++i) {
        p[i] = float_to_bf16(wide[i]);
    }
}

// Up to eight, the rest zero.
inline F8 load8_some(const float* p, std::int64_t count) {
    float wide[8] = {};
    for (std::int64_t i = 0; i < count; ++i) {
        wide[i] = p[i];
    }
    return load8(wide);
}

// e^x, within 2 ulp, of x clamped to [-87.3, 88]. NaN stays NaN: min8 and max8 give their second operand then.
inline F8 exp8(F8 x) {
    const F8 low = set8(-87.33654F);
    const F8 inside = max8(low, min8(set8(88.0F), x));
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
