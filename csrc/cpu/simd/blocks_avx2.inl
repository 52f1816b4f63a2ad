// Packed blocks of weights, and one digit of 32 inputs, with AVX2.

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

// A 5-bit block likewise. Sums of pairs stay below 2 * 31 * 127 = 7874, so four of them fit 16 bits.
using Fives = Nibbles;
inline Fives fives_of(const std::uint8_t* p, const std::uint8_t* high) {
    Fives n = nibbles_of(p);
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        const __m256i shifted = i < 4 ? _mm256_slli_epi16(bits, 4 - i) : _mm256_srli_epi16(bits, i - 4);
        n.piece[i] = _mm256_or_si256(n.piece[i], _mm256_and_si256(shifted, _mm256_set1_epi8(16)));
    }
    return n;
}
inline F8 dot_fives(const Fives& n, const std::int8_t* a) {
    __m256i sum = _mm256_setzero_si256();
    for (int half = 0; half < 8; half += 4) {
        __m256i pairs = _mm256_maddubs_epi16(n.piece[half], four(a + 4 * half));
        for (int i = half + 1; i < half + 4; ++i) {
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(n.piece[i], four(a + 4 * i)));
        }
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return _mm256_cvtepi32_ps(sum);
}

// Half of a 6-bit block, as signed bytes and their magnitudes, which are at most 32: sums of four pairs fit 16 bits.
struct Sixes {
    __m256i piece[4], magnitude[4];
};
inline Sixes sixes_of(const std::uint8_t* p, const std::uint8_t* high, int half) {
    Sixes n;
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high + 64 * half));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * i));
        const __m256i low = _mm256_and_si256(_mm256_srli_epi16(bytes, 4 * half), _mm256_set1_epi8(15));
        const __m256i shifted = i < 2 ? _mm256_slli_epi16(bits, 4 - 2 * i) : _mm256_srli_epi16(bits, 2 * i - 4);
        const __m256i number = _mm256_or_si256(low, _mm256_and_si256(shifted, _mm256_set1_epi8(48)));
        n.piece[i] = _mm256_sub_epi8(number, _mm256_set1_epi8(32));
        n.magnitude[i] = _mm256_abs_epi8(n.piece[i]);
    }
    return n;
}
// Half of a 3-bit block likewise.
inline Sixes threes_of(const std::uint8_t* p, const std::uint8_t* high, int half) {
    Sixes n;
    const __m256i twos = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * half));
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        const int bit = 4 * half + i;
        const __m256i two = _mm256_and_si256(_mm256_srli_epi16(twos, 2 * i), _mm256_set1_epi8(3));
        const __m256i moved = bit < 2 ? _mm256_slli_epi16(bits, 2 - bit) : _mm256_srli_epi16(bits, bit - 2);
        const __m256i number = _mm256_or_si256(two, _mm256_and_si256(moved, _mm256_set1_epi8(4)));
        n.piece[i] = _mm256_sub_epi8(number, _mm256_set1_epi8(4));
        n.magnitude[i] = _mm256_abs_epi8(n.piece[i]);
    }
    return n;
}
inline F8 dot_sixes(const Sixes& n, const std::int8_t* a) {
    __m256i sum = _mm256_maddubs_epi16(n.magnitude[0], _mm256_sign_epi8(four(a), n.piece[0]));
    for (int i = 1; i < 4; ++i) {
        const __m256i pairs = _mm256_maddubs_epi16(n.magnitude[i], _mm256_sign_epi8(four(a + 4 * i), n.piece[i]));
        sum = _mm256_add_epi16(sum, pairs);
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
inline __m256i whole_dot(const Bytes& b, const std::int8_t* a) {
    __m256i sum = _mm256_setzero_si256();
    for (int i = 0; i < 8; ++i) {
        const __m256i pairs =
            _mm256_maddubs_epi16(_mm256_abs_epi8(b.piece[i]), _mm256_sign_epi8(four(a + 4 * i), b.piece[i]));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    return sum;
}
inline F8 dot_bytes(const Bytes& b, const std::int8_t* a) { return _mm256_cvtepi32_ps(whole_dot(b, a)); }

template <Format kFormat>
inline __m128i unsigned_codes() {
    return _mm_load_si128(reinterpret_cast<const __m128i*>(kUnsignedCodes<kFormat>.numbers));
}
// A block of codes as its numbers: those of kMxfp4 12 larger, so 24 at most, and four sums of pairs fit 16 bits; those
// of kIq4Numbers with their sign.
template <Format kFormat>
inline auto coded_of(const std::uint8_t* p) {
    const Nibbles codes = nibbles_of(p);
    std::conditional_t<has_signed_numbers(kFormat), Bytes, Nibbles> n;
    const __m128i sign = _mm_set1_epi8(has_signed_numbers(kFormat) ? -128 : 0);
    const __m256i table = _mm256_broadcastsi128_si256(_mm_xor_si128(unsigned_codes<kFormat>(), sign));
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        n.piece[i] = _mm256_shuffle_epi8(table, codes.piece[i]);
    }
    return n;
}
inline F8 dot_coded(const Nibbles& n, const std::int8_t* a) { return dot_fives(n, a); }
inline F8 dot_coded(const Bytes& n, const std::int8_t* a) { return dot_bytes(n, a); }

// Numbers of 16 bits, two neighbours of k in each of eight rows, and sums of their products.
constexpr bool kDigitsApart = true;  // the products above are quicker for one column
constexpr int kWideColumns = 4;      // whose sums registers have room for
using Pairs8 = __m256i;
using Whole8 = __m256i;
inline Pairs8 pairs_of(const std::int16_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
inline Pairs8 same_pairs(const std::int16_t* x) {
    std::int32_t both;
    std::memcpy(&both, x, 4);
    return _mm256_set1_epi32(both);
}
inline Whole8 times8(Pairs8 a, Pairs8 b) { return _mm256_madd_epi16(a, b); }
inline Whole8 add8(Whole8 a, Whole8 b) { return _mm256_add_epi32(a, b); }
inline Whole8 load8_whole(const std::int32_t* p) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(p)); }
inline void store8_whole(std::int32_t* p, Whole8 a) { _mm256_store_si256(reinterpret_cast<__m256i*>(p), a); }
inline F8 to_float8(Whole8 a) { return _mm256_cvtepi32_ps(a); }
inline void as_is(Whole8& a) { __asm__("" : "+x"(a)); }

// The numbers of eight rows, with their sign where the format has_signed_numbers.
template <Format kFormat>
inline void pieces_of(const std::uint8_t* p, const std::uint8_t* high, __m256i (&bytes)[8]) {
    const auto take = [&](const auto& from, int first, int count) {
        for (int i = 0; i < count; ++i) {
            bytes[first + i] = from.piece[i];
        }
    };
    if (has_bytes(kFormat)) {
        take(bytes_of(p), 0, 8);
    } else if (kFormat == Format::kQ3K) {
        take(threes_of(p, high, 0), 0, 4);
        take(threes_of(p, high, 1), 4, 4);
    } else if (has_half_scales(kFormat)) {
        take(sixes_of(p, high, 0), 0, 4);
        take(sixes_of(p, high, 1), 4, 4);
    } else if (high_bits(kFormat) == 1) {
        take(fives_of(p, high), 0, 8);
    } else if constexpr (has_codes(kFormat)) {
        take(coded_of<kFormat>(p), 0, 8);
    } else {
        take(nibbles_of(p), 0, 8);
    }
}

// The same, larger by their offset where they have a sign, so that none has one: of four neighbours each, at distances
// of `stride` bytes.
template <Format kFormat>
inline void unsigned_bytes(const std::uint8_t* p, const std::uint8_t* high, std::uint8_t* to, std::size_t stride) {
    __m256i bytes[8];
    pieces_of<kFormat>(p, high, bytes);
    const __m256i offset = _mm256_set1_epi8(has_signed_numbers(kFormat) ? static_cast<char>(offset_of(kFormat)) : 0);
    for (const __m256i& piece : bytes) {
        _mm256_store_si256(reinterpret_cast<__m256i*>(to), _mm256_add_epi8(piece, offset));
        to += stride;
    }
}

// The numbers of eight rows in 16 bits, to[k / 2][row]: of each four neighbours the first and the third lie together,
// then the others.
template <Format kFormat>
inline void spread_rows(const std::uint8_t* p, const std::uint8_t* high, std::int16_t (*to)[2]) {
    __m256i bytes[8];
    pieces_of<kFormat>(p, high, bytes);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i, to += 2 * kGroupRows) {
        constexpr bool kWithSign = has_signed_numbers(kFormat);
        const __m256i even = kWithSign ? _mm256_srai_epi16(_mm256_slli_epi16(bytes[i], 8), 8)
                                       : _mm256_and_si256(bytes[i], _mm256_set1_epi16(255));
        const __m256i odd = kWithSign ? _mm256_srai_epi16(bytes[i], 8) : _mm256_srli_epi16(bytes[i], 8);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to), even);
        _mm256_store_si256(reinterpret_cast<__m256i*>(to + kGroupRows), odd);
    }
}

// The 15 bits of 32 inputs as one number each, in that order.
inline void widen_digits(const std::int8_t* high, const std::int8_t* low, std::int16_t* to) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
    const auto sixteen = [](const std::int8_t* p) {
        return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    };
    for (int k = 0; k < 32; k += 16) {
        static_assert(kDigit == 1 << 7);
        const __m256i number = _mm256_add_epi16(_mm256_slli_epi16(sixteen(high + k), 7), sixteen(low + k));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + k), _mm256_shuffle_epi8(number, order));
    }
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

// Eight bytes as floats.
inline F8 load8_u8(const std::uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
inline F8 load8_i8(const std::uint8_t* p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}

// Of each 32-bit lane, the number whose code begins at `shift`.
template <Format kFormat>
inline F8 number8(Words w, std::uint32_t shift) {
    const __m256i codes = _mm256_srlv_epi32(w.v, _mm256_set1_epi32(static_cast<int>(shift)));
    if (kFormat != Format::kMxfp4) {
        const auto* numbers = reinterpret_cast<const std::uint8_t*>(shape_of(kFormat).codes);
        const F8 low = _mm256_permutevar8x32_ps(load8_i8(numbers), codes);  // by three bits
        const F8 high = _mm256_permutevar8x32_ps(load8_i8(numbers + 8), codes);
        return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)));
    }
    const F8 sizes = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 1, 2, 3, 4, 6, 8, 12), codes);  // by three bits
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi32(codes, 28), _mm256_set1_epi32(INT32_MIN));
    return _mm256_xor_ps(sizes, _mm256_castsi256_ps(sign));
}

inline Words same_words(const std::uint16_t* p) {
    std::int32_t word;
    std::memcpy(&word, p, 4);
    return {_mm256_set1_epi32(word)};
}
// The low and the high word of each 32-bit lane, which are bfloat16.
inline F8 low_words(Words w) { return _mm256_castsi256_ps(_mm256_slli_epi32(w.v, 16)); }
inline F8 high_words(Words w) {
    return _mm256_castsi256_ps(_mm256_and_si256(w.v, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}

// 32 floats in [-127, 127] to int8; returns the sums of the first 16, and of all.
struct Sums {
    std::int32_t first, all;
};
inline Sums store32_i8(std::int8_t* p, const F8* x) {
    const __m256i a = _mm256_cvtps_epi32(x[0]), b = _mm256_cvtps_epi32(x[1]);
    const __m256i c = _mm256_cvtps_epi32(x[2]), d = _mm256_cvtps_epi32(x[3]);
    const __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
    const __m256i in_order = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), in_order);
    const __m256i firsts = _mm256_add_epi32(a, b), sums = _mm256_add_epi32(firsts, _mm256_add_epi32(c, d));
    const __m256i pairs = _mm256_hadd_epi32(firsts, sums);  // of each half of both, two sums beside each other
    __m128i sum = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    sum = _mm_add_epi32(sum, _mm_shuffle_epi32(sum, 0xb1));
    return {_mm_cvtsi128_si32(sum), _mm_extract_epi32(sum, 2)};
}
