// Packed blocks of weights, and one digit of 32 inputs, in plain C++. Sums of whole numbers below 2^24 are exact in
// floats, which every processor multiplies four at a time; whole numbers of 32 bits it may not.

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

// Calls add(i, bits) with bits [shift, shift + 8) of each word as a number, for the words of eight rows in turn.
struct Nibbles {
    const std::uint8_t* p;
};
inline Nibbles nibbles_of(const std::uint8_t* p) { return {p}; }
inline V4 dot4_nibbles(const std::uint8_t* p, const std::int8_t* a) {
    V4 sum{};
    for (int k = 0; k < 16; k += 4, p += 64) {
        U4 words = load4_words(p);
        for (int i = k; i < k + 4; ++i, words >>= 8) {
            sum += signed_to_float(words & 15U) * static_cast<float>(a[i]);
            sum += signed_to_float(words >> 4 & 15U) * static_cast<float>(a[i + 16]);
        }
    }
    return sum;
}
inline F8 dot_nibbles(const Nibbles& n, const std::int8_t* a) {
    return {dot4_nibbles(n.p, a), dot4_nibbles(n.p + 16, a)};
}
// The numbers of a 5-bit block, and of half a 6-bit block, with the bits above their nibbles.
struct Fives {
    const std::uint8_t *p, *high;
};
inline Fives fives_of(const std::uint8_t* p, const std::uint8_t* high) { return {p, high}; }
inline V4 dot4_fives(const std::uint8_t* p, const std::uint8_t* high, const std::int8_t* a) {
    V4 sum{};
    for (unsigned k = 0; k < 16; k += 4, p += 64) {
        U4 words = load4_words(p), bits = load4_words(high) >> (k / 4);
        for (unsigned i = k; i < k + 4; ++i, words >>= 8, bits >>= 8) {
            sum += signed_to_float((words & 15U) | (bits & 1U) << 4) * static_cast<float>(a[i]);
            sum += signed_to_float((words >> 4 & 15U) | (bits & 16U)) * static_cast<float>(a[i + 16]);
        }
    }
    return sum;
}
inline F8 dot_fives(const Fives& n, const std::int8_t* a) {
    return {dot4_fives(n.p, n.high, a), dot4_fives(n.p + 16, n.high + 16, a)};
}
// A block of codes, as numbers that are 12 larger.
struct Coded {
    const std::uint8_t* p;
};
inline Coded coded_of(const std::uint8_t* p) { return {p}; }
inline V4 numbers4(U4 codes) {
    const V4 code = signed_to_float(codes & 7U);
    const V4 size = code + max4(code - 4.0F, V4{}) + max4(code * 2.0F - 12.0F, V4{});
    return either4((codes & 8U) != 0U, -size, size);
}
inline V4 dot4_coded(const std::uint8_t* p, const std::int8_t* a) {
    V4 sum{};
    for (int k = 0; k < 16; k += 4, p += 64) {
        U4 words = load4_words(p);
        for (int i = k; i < k + 4; ++i, words >>= 8) {
            sum += (numbers4(words) + 12.0F) * static_cast<float>(a[i]);
            sum += (numbers4(words >> 4) + 12.0F) * static_cast<float>(a[i + 16]);
        }
    }
    return sum;
}
inline F8 dot_coded(const Coded& n, const std::int8_t* a) { return {dot4_coded(n.p, a), dot4_coded(n.p + 16, a)}; }

struct Sixes {
    const std::uint8_t *p, *high;
    unsigned shift;  // of the half's nibbles
};
inline Sixes sixes_of(const std::uint8_t* p, const std::uint8_t* high, int half) {
    return {p, high + 64 * half, 4 * static_cast<unsigned>(half)};
}
inline V4 dot4_sixes(const std::uint8_t* p, const std::uint8_t* high, unsigned shift, const std::int8_t* a) {
    V4 sum{};
    for (unsigned k = 0; k < 16; k += 4, p += 64) {
        U4 words = load4_words(p) >> shift, bits = load4_words(high) >> (k / 2);
        for (unsigned i = k; i < k + 4; ++i, words >>= 8, bits >>= 8) {
            sum += signed_to_float(((words & 15U) | (bits & 3U) << 4) - 32U) * static_cast<float>(a[i]);
        }
    }
    return sum;
}
inline F8 dot_sixes(const Sixes& n, const std::int8_t* a) {
    return {dot4_sixes(n.p, n.high, n.shift, a), dot4_sixes(n.p + 16, n.high + 16, n.shift, a)};
}
using Bytes = Nibbles;
inline Bytes bytes_of(const std::uint8_t* p) { return {p}; }
inline V4 dot4_bytes(const std::uint8_t* p, const std::int8_t* a) {
    V4 sum{};
    for (int k = 0; k < 32; k += 4, p += 64) {
        U4 words = load4_words(p);
        for (int i = k; i < k + 4; ++i, words >>= 8) {
            sum += signed_to_float((words & 255U) - 128U) * static_cast<float>(a[i]);
        }
    }
    return sum;
}
inline F8 dot_bytes(const Bytes& b, const std::int8_t* a) { return {dot4_bytes(b.p, a), dot4_bytes(b.p + 16, a)}; }

inline Words words_of(const std::uint8_t* p) { return {p}; }
inline Words same_words(const std::uint16_t* p) { return {reinterpret_cast<const std::uint8_t*>(p), 0}; }
inline F8 pick_of(Words w, std::uint32_t shift, int mask) {
    const auto bits = static_cast<std::uint32_t>(mask);
    return {signed_to_float(load4_words(w.p) >> shift & bits), signed_to_float(load4_words(w.p + 16) >> shift & bits)};
}
inline F8 number8(Words w, std::uint32_t shift) {
    return {numbers4(load4_words(w.p) >> shift), numbers4(load4_words(w.p + 16) >> shift)};
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
