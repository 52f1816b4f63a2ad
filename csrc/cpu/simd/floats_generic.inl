// Eight floats in plain C++, for every processor: two vectors of four, which GCC and Clang know on all of them. This
// file defines what the other versions do. Loops over eight numbers took a compiler five times as long.

using V4 = float __attribute__((vector_size(16)));
using I4 = std::int32_t __attribute__((vector_size(16)));
using U4 = std::uint32_t __attribute__((vector_size(16)));

struct F8 {
    V4 low, high;
};

inline V4 set4(float x) { return V4{x, x, x, x}; }
inline I4 set4_int(std::int32_t x) { return I4{x, x, x, x}; }
inline V4 floats_of(U4 bits) { return reinterpret_cast<V4>(bits); }
inline U4 bits_of(V4 x) { return reinterpret_cast<U4>(x); }
inline V4 signed_to_float(U4 x) { return __builtin_convertvector(reinterpret_cast<I4>(x), V4); }
// a where the mask has ones, b where it has zeros.
inline V4 either4(I4 mask, V4 a, V4 b) {
    return reinterpret_cast<V4>((reinterpret_cast<I4>(a) & mask) | (reinterpret_cast<I4>(b) & ~mask));
}
// Four numbers of memory in 32 bits each.
template <typename T>
inline U4 load4_as(const void* p) {
    T x[4];
    std::memcpy(x, p, sizeof x);
    return U4{static_cast<std::uint32_t>(x[0]), static_cast<std::uint32_t>(x[1]), static_cast<std::uint32_t>(x[2]),
              static_cast<std::uint32_t>(x[3])};
}

inline F8 set8(float x) { return {set4(x), set4(x)}; }
inline F8 zero8() { return set8(0); }
inline F8 load8(const float* p) {
    F8 r;
    std::memcpy(&r.low, p, sizeof r.low);
    std::memcpy(&r.high, p + 4, sizeof r.high);
    return r;
}
inline void store8(float* p, F8 x) {
    std::memcpy(p, &x.low, sizeof x.low);
    std::memcpy(p + 4, &x.high, sizeof x.high);
}
inline F8 add8(F8 a, F8 b) { return {a.low + b.low, a.high + b.high}; }
inline F8 sub8(F8 a, F8 b) { return {a.low - b.low, a.high - b.high}; }
inline F8 mul8(F8 a, F8 b) { return {a.low * b.low, a.high * b.high}; }
inline F8 div8(F8 a, F8 b) { return {a.low / b.low, a.high / b.high}; }
inline V4 max4(V4 a, V4 b) { return either4(a > b, a, b); }
inline V4 min4(V4 a, V4 b) { return either4(a < b, a, b); }
inline F8 max8(F8 a, F8 b) { return {max4(a.low, b.low), max4(a.high, b.high)}; }
inline F8 min8(F8 a, F8 b) { return {min4(a.low, b.low), min4(a.high, b.high)}; }
inline F8 fma8(F8 a, F8 b, F8 c) { return {a.low * b.low + c.low, a.high * b.high + c.high}; }
inline V4 or4(V4 a, V4 b) { return floats_of(bits_of(a) | bits_of(b)); }
inline F8 or8(F8 a, F8 b) { return {or4(a.low, b.low), or4(a.high, b.high)}; }
inline V4 abs4(V4 a) { return floats_of(bits_of(a) & 0x7fffffffU); }
inline F8 abs8(F8 a) { return {abs4(a.low), abs4(a.high)}; }
// To the nearest whole number, ties to even. From 2^23 on floats are whole; below, adding 2^23 rounds.
inline V4 round4(V4 a) {
    const V4 size = abs4(a), whole = size + 8388608.0F - 8388608.0F;
    return either4(size < 8388608.0F, or4(whole, floats_of(bits_of(a) & 0x80000000U)), a);
}
inline F8 round8(F8 a) { return {round4(a.low), round4(a.high)}; }
inline std::uint32_t bits4(I4 mask) {
    const I4 bits = mask & I4{1, 2, 4, 8};
    return static_cast<std::uint32_t>((bits[0] | bits[1]) | (bits[2] | bits[3]));
}
inline std::uint32_t same8(F8 a, F8 b) { return bits4(a.low == b.low) | bits4(a.high == b.high) << 4; }
inline V4 exponent4(V4 a) {
    const I4 n = __builtin_convertvector(either4(a == a, a, V4{}), I4);
    return floats_of(reinterpret_cast<U4>(n + 127) << 23);
}
inline F8 exponent8(F8 a) { return {exponent4(a.low), exponent4(a.high)}; }
inline F8 exponent_of(F8 a) { return {floats_of(bits_of(a.low) << 23), floats_of(bits_of(a.high) << 23)}; }

// float16, in the low bits of each number.
inline V4 halves4(U4 half) {
    const U4 sign = (half & 0x8000U) << 16, exponent = half >> 10 & 31U, mantissa = half & 1023U;
    const V4 tiny = signed_to_float(mantissa) * (1.0F / 16777216.0F);
    const V4 normal = floats_of(((exponent + 112U) << 23) | mantissa << 13);
    const U4 quiet = reinterpret_cast<U4>(mantissa != 0U) & 0x400000U;
    const V4 endless = floats_of(0x7f800000U | mantissa << 13 | quiet);
    const V4 size = either4(exponent == 0U, tiny, either4(exponent == 31U, endless, normal));
    return or4(size, floats_of(sign));
}
inline V4 e4m3_halves4(U4 x) {
    const V4 number = halves4((x & 0x7fU) << 7 | (x & 0x80U) << 8);
    return either4((x & 0x7fU) == 0x7fU, floats_of((x & 0x80U) << 24 | 0x7fc00000U), number);
}
inline F8 load8_f16(const std::uint16_t* p) {
    return {halves4(load4_as<std::uint16_t>(p)), halves4(load4_as<std::uint16_t>(p + 4))};
}
inline F8 load8_bf16(const std::uint16_t* p) {
    return {floats_of(load4_as<std::uint16_t>(p) << 16), floats_of(load4_as<std::uint16_t>(p + 4) << 16)};
}
inline F8 load8_i8(const char* p) {
    return {signed_to_float(load4_as<std::int8_t>(p)), signed_to_float(load4_as<std::int8_t>(p + 4))};
}
inline F8 load8_e5m2(const char* p) {
    return {halves4(load4_as<std::uint8_t>(p) << 8), halves4(load4_as<std::uint8_t>(p + 4) << 8)};
}
// Without kE4M3Factor.
inline F8 load8_e4m3(const char* p) {
    return {e4m3_halves4(load4_as<std::uint8_t>(p)), e4m3_halves4(load4_as<std::uint8_t>(p + 4))};
}
inline void store8_bf16(std::uint16_t* p, F8 x) {
    float wide[8];
    store8(wide, x);
    for (int i = 0; i < 8; ++i) {
        p[i] = float_to_bf16(wide[i]);
    }
}
inline void store8_f16(std::uint16_t* p, F8 x) {
    float wide[8];
    store8(wide, x);
    for (int i = 0; i < 8; ++i) {
        p[i] = float_to_half(wide[i]);
    }
}
inline float sum8(F8 x) {
    const V4 s = x.low + x.high;
    return (s[0] + s[2]) + (s[1] + s[3]);
}
inline float top8(F8 x) {
    float wide[8];
    store8(wide, x);
    float top = wide[0];
    for (int i = 1; i < 8; ++i) {
        top = wide[i] > top ? wide[i] : top;
    }
    return top;
}

template <int kPart>
inline V4 word4(V4 words) {
    return floats_of(kPart == 0 ? bits_of(words) << 16 : bits_of(words) & ~0xffffU);
}
template <int kPart>
inline F8 word8(F8 words) {
    return {word4<kPart>(words.low), word4<kPart>(words.high)};
}
template <int kPart>
inline V4 byte4(V4 words) {
    const I4 top = reinterpret_cast<I4>(bits_of(words) << (24 - 8 * kPart));
    return __builtin_convertvector(top >> 24, V4);
}
template <int kPart>
inline F8 byte8(F8 words) {
    return {byte4<kPart>(words.low), byte4<kPart>(words.high)};
}

inline F8 choose8(std::uint32_t bits, F8 a, F8 b) {
    const I4 set = set4_int(static_cast<std::int32_t>(bits));
    return {either4((set & I4{1, 2, 4, 8}) != 0, a.low, b.low),
            either4((set & I4{16, 32, 64, 128}) != 0, a.high, b.high)};
}

inline void transpose8(F8 (&x)[8]) {
    float y[8][8];
    for (int i = 0; i < 8; ++i) {
        store8(y[i], x[i]);
    }
    for (int i = 0; i < 8; ++i) {
        x[i] = {V4{y[0][i], y[1][i], y[2][i], y[3][i]}, V4{y[4][i], y[5][i], y[6][i], y[7][i]}};
    }
}

inline std::uint32_t more8(F8 a, F8 b) { return bits4(a.low > b.low) | bits4(a.high > b.high) << 4; }
inline F8 tops8(F8 (&x)[8]) {
    transpose8(x);
    for (int i = 1; i < 8; ++i) {
        x[0] = max8(x[0], x[i]);
    }
    return x[0];
}

inline void fetch(const void*) {}
inline void fetch_second(const void*) {}
