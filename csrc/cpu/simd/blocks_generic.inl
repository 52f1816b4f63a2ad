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
inline std::int32_t store32_i8(std::int8_t* p, const F8* x) {
    std::int32_t sum = 0;
    for (int i = 0; i < 4; ++i) {
        float wide[8];
        store8(wide, round8(x[i]));
        for (int j = 0; j < 8; ++j) {
            p[8 * i + j] = static_cast<std::int8_t>(wide[j]);
            sum += p[8 * i + j];
        }
    }
    return sum;
}
