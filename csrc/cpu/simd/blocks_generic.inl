// Packed blocks of weights, and their products with whole inputs, in plain C++.

// Of a 32-bit word for each of eight rows.
struct Words {
    const std::uint8_t* p;
    int step = 4;  // from one word to the next; 0 where all are the same one
};
inline U4 load4_words(const std::uint8_t* p) {
    U4 words;
    std::memcpy(&words, p, sizeof words);
    return words;
}

template <Format kFormat>
inline V4 numbers4(U4 codes) {
    if (kFormat != Format::kMxfp4) {
        const auto number = [&](int i) { return static_cast<float>(shape_of(kFormat).codes[codes[i] & 15U]); };
        return V4{number(0), number(1), number(2), number(3)};
    }
    const V4 code = signed_to_float(codes & 7U);
    const V4 size = code + max4(code - 4.0F, V4{}) + max4(code * 2.0F - 12.0F, V4{});
    return either4((codes & 8U) != 0U, -size, size);
}

// Numbers of 16 bits, two neighbours of k in each of eight rows, and sums of their products.
constexpr bool kDigitsApart = false;  // spread numbers are quicker even for one column
constexpr int kWideColumns = 2;       // whose sums registers have room for
using S8 = std::int16_t __attribute__((vector_size(16)));
struct Pairs8 {
    I4 low, high;
};
struct Whole8 {
    I4 low, high;
};
inline Pairs8 pairs_of(const std::int16_t* p) {
    Pairs8 pairs;
    std::memcpy(&pairs.low, p, sizeof pairs.low);
    std::memcpy(&pairs.high, p + 8, sizeof pairs.high);
    return pairs;
}
inline Pairs8 same_pairs(const std::int16_t* x) {
    std::int32_t both;
    std::memcpy(&both, x, 4);
    return {set4_int(both), set4_int(both)};
}
inline I4 times4(I4 a, I4 b) {
#if defined(__SSE2__)  // x86-64's least processor multiplies pairs, but no whole numbers of 32 bits
    return reinterpret_cast<I4>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
    return (a >> 16) * (b >> 16) + (a << 16 >> 16) * (b << 16 >> 16);
#endif
}
inline Whole8 times8(Pairs8 a, Pairs8 b) { return {times4(a.low, b.low), times4(a.high, b.high)}; }
inline Whole8 add8(Whole8 a, Whole8 b) { return {a.low + b.low, a.high + b.high}; }
inline Whole8 load8_whole(const std::int32_t* p) {
    Whole8 whole;
    std::memcpy(&whole.low, p, sizeof whole.low);
    std::memcpy(&whole.high, p + 4, sizeof whole.high);
    return whole;
}
inline void store8_whole(std::int32_t* p, Whole8 a) {
    std::memcpy(p, &a.low, sizeof a.low);
    std::memcpy(p + 4, &a.high, sizeof a.high);
}
inline F8 to_float8(Whole8 a) { return {__builtin_convertvector(a.low, V4), __builtin_convertvector(a.high, V4)}; }
inline void as_is(Whole8&) {}

// The numbers of two codes, the first one's in the low byte: half as many look-ups.
struct CodePairs {
    std::uint16_t numbers[256] = {};
};
template <Format kFormat>
constexpr CodePairs make_code_pairs() {
    CodePairs pairs;
    for (int both = 0; both < 256; ++both) {
        const std::uint8_t* numbers = kUnsignedCodes<kFormat>.numbers;
        pairs.numbers[both] = static_cast<std::uint16_t>(numbers[both & 15] | numbers[both >> 4] << 8);
    }
    return pairs;
}
template <Format kFormat>
constexpr CodePairs kCodePairs = make_code_pairs<kFormat>();

// Of four rows the bytes of four neighbours of k: numbers, or numbers that are kOffset<kFormat> larger.
template <Format kFormat>
constexpr std::int16_t kOffset = has_signed_numbers(kFormat) ? static_cast<std::int16_t>(offset_of(kFormat)) : 0;
template <Format kFormat>
inline U4 four_bytes(const std::uint8_t* p, const std::uint8_t* high, unsigned four) {
    if (has_bytes(kFormat)) {
        return load4_words(p + 64 * four);
    }
    const unsigned half = four / 4, place = four % 4;
    if (kFormat == Format::kQ3K) {
        const U4 twos = load4_words(p + 64 * half) >> (2 * place) & 0x03030303U;
        return twos | (load4_words(high) >> four & 0x01010101U) << 2;
    }
    U4 bytes = load4_words(p + 64 * place) >> (4 * half) & 0x0f0f0f0fU;
    if (high_bits(kFormat) == 1) {
        const U4 bits = load4_words(high) >> place;
        bytes |= half == 0 ? (bits & 0x01010101U) << 4 : bits & 0x10101010U;
    } else if (high_bits(kFormat) == 2) {
        bytes |= (load4_words(high + 64 * half) >> (2 * place) & 0x03030303U) << 4;
    } else if constexpr (has_codes(kFormat)) {
        const U4 twos = (bytes | bytes >> 4) & 0x00ff00ffU;  // codes of two neighbours
        std::uint16_t pairs[8];
        std::memcpy(pairs, &twos, sizeof pairs);
        for (std::uint16_t& pair : pairs) {
            pair = kCodePairs<kFormat>.numbers[pair];
        }
        std::memcpy(&bytes, pairs, sizeof pairs);
    }
    return bytes;
}

// The numbers of eight rows in 16 bits, to[k / 2][row]: of each four neighbours the first and the third lie together,
// then the others.
template <Format kFormat>
inline void spread_rows(const std::uint8_t* p, const std::uint8_t* high, std::int16_t (*to)[2]) {
    const auto put = [](U4 numbers, std::int16_t (*at)[2]) {
        const S8 exact = reinterpret_cast<S8>(numbers) - kOffset<kFormat>;
        std::memcpy(at, &exact, sizeof exact);
    };
    for (unsigned four = 0; four < 8; ++four, to += 2 * kGroupRows) {
        for (int row = 0; row < 8; row += 4) {
            const U4 bytes = four_bytes<kFormat>(p + 4 * row, high + 4 * row, four);
            put(bytes & 0x00ff00ffU, to + row);
            put(bytes >> 8 & 0x00ff00ffU, to + kGroupRows + row);
        }
    }
}

// The 15 bits of 32 inputs as one number each, in that order.
inline void widen_digits(const std::int8_t* high, const std::int8_t* low, std::int16_t* to) {
    for (int k = 0; k < 32; k += 16, high += 16, low += 16, to += 16) {
        const U4 highs = load4_words(reinterpret_cast<const std::uint8_t*>(high));
        const U4 lows = load4_words(reinterpret_cast<const std::uint8_t*>(low));
        const auto numbers = [](U4 high_bytes, U4 low_bytes) {  // of the upper byte of each 16 bits
            const S8 number = (reinterpret_cast<S8>(high_bytes) >> 8) * kDigit + (reinterpret_cast<S8>(low_bytes) >> 8);
            return reinterpret_cast<U4>(number);
        };
        const U4 even = numbers(highs << 8, lows << 8), odd = numbers(highs, lows);
        const U4 mixed[2] = {U4{even[0], odd[0], even[1], odd[1]}, U4{even[2], odd[2], even[3], odd[3]}};
        std::memcpy(to, mixed, sizeof mixed);
    }
}

inline Words words_of(const std::uint8_t* p) { return {p}; }
inline Words same_words(const std::uint16_t* p) { return {reinterpret_cast<const std::uint8_t*>(p), 0}; }
inline F8 pick_of(Words w, std::uint32_t shift, int mask) {
    const auto bits = static_cast<std::uint32_t>(mask);
    return {signed_to_float(load4_words(w.p) >> shift & bits), signed_to_float(load4_words(w.p + 16) >> shift & bits)};
}
template <Format kFormat>
inline F8 number8(Words w, std::uint32_t shift) {
    return {numbers4<kFormat>(load4_words(w.p) >> shift), numbers4<kFormat>(load4_words(w.p + 16) >> shift)};
}
// The words themselves, as bits.
inline U4 some_words(Words w, int first) {
    if (w.step != 0) {
        return load4_words(w.p + 4 * first);
    }
    std::uint32_t word;
    std::memcpy(&word, w.p, sizeof word);
    return U4{word, word, word, word};
}
inline F8 low_words(Words w) { return {floats_of(some_words(w, 0) << 16), floats_of(some_words(w, 4) << 16)}; }
inline F8 high_words(Words w) {
    return {floats_of(some_words(w, 0) & ~0xffffU), floats_of(some_words(w, 4) & ~0xffffU)};
}
// Eight bytes as floats.
inline F8 load8_u8(const std::uint8_t* p) {
    float wide[8];
    for (int i = 0; i < 8; ++i) {
        wide[i] = static_cast<float>(p[i]);
    }
    return load8(wide);
}
inline F8 load8_i8(const std::uint8_t* p) {
    float wide[8];
    for (int i = 0; i < 8; ++i) {
        wide[i] = static_cast<float>(static_cast<std::int8_t>(p[i]));
    }
    return load8(wide);
}

// 32 floats in [-127, 127] to int8; returns the sums of the first 16, and of all.
struct Sums {
    std::int32_t first, all;
};
inline Sums store32_i8(std::int8_t* p, const F8* x) {
    Sums sums{};
    for (int i = 0; i < 4; ++i) {
        float wide[8];
        store8(wide, round8(x[i]));
        for (int j = 0; j < 8; ++j) {
            p[8 * i + j] = static_cast<std::int8_t>(wide[j]);
            sums.first += i < 2 ? p[8 * i + j] : 0;
            sums.all += p[8 * i + j];
        }
    }
    return sums;
}
