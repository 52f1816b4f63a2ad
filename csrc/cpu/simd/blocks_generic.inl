// Packed blocks of weights, and one digit of 32 inputs, in plain C++.

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
    int step = 4;  // from one word to the next; 0 where all are the same one
};
inline Words words_of(const std::uint8_t* p) { return {p}; }
inline Words same_words(const std::uint16_t* p) { return {reinterpret_cast<const std::uint8_t*>(p), 0}; }
inline F8 pick_of(Words w, std::uint32_t shift, int mask) {
    return each8([&](int i) { return static_cast<float>(w.p[4 * i + shift / 8] >> shift % 8 & mask); });
}
inline F8 low_halves(Words w) {
    return each8([&](int i) {
        std::uint16_t bits;
        std::memcpy(&bits, w.p + w.step * i, 2);
        return bf16_to_float(bits);
    });
}
inline F8 high_halves(Words w) { return low_halves({w.p + 2, w.step}); }
inline std::int32_t store32_i8(std::int8_t* p, const F8* x) {
    std::int32_t sum = 0;
    for (int i = 0; i < 32; ++i) {
        p[i] = static_cast<std::int8_t>(std::nearbyintf(x[i / 8].v[i % 8]));
        sum += p[i];
    }
    return sum;
}
