// Eight floats in plain C++, for every processor. This file defines what the other versions do.

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
inline F8 or8(F8 a, F8 b) {
    return each8([&](int i) { return float_of(bits_of(a.v[i]) | bits_of(b.v[i])); });
}
inline F8 abs8(F8 a) {
    return each8([&](int i) { return fabsf(a.v[i]); });
}
inline F8 round8(F8 a) {
    return each8([&](int i) { return nearbyintf(a.v[i]); });
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
inline F8 times_power8(F8 x, F8 n) { return mul8(x, exponent8(n)); }
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
inline void store8_bf16(std::uint16_t* p, F8 x) {
    for (int i = 0; i < 8; ++i) {
        p[i] = float_to_bf16(x.v[i]);
    }
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

template <int kPart>
inline F8 half8(F8 words) {
    return each8(
        [&](int i) { return float_of(kPart == 0 ? bits_of(words.v[i]) << 16 : bits_of(words.v[i]) & ~0xffffU); });
}
template <int kPart>
inline F8 byte8(F8 words) {
    return each8([&](int i) { return static_cast<float>(static_cast<std::int8_t>(bits_of(words.v[i]) >> 8 * kPart)); });
}

inline F8 choose8(std::uint32_t bits, F8 a, F8 b) {
    return each8([&](int i) { return (bits >> i & 1) != 0 ? a.v[i] : b.v[i]; });
}

inline void transpose8(F8 (&x)[8]) {
    for (int i = 0; i < 8; ++i) {
        for (int j = 0; j < i; ++j) {
            const float other = x[i].v[j];
            x[i].v[j] = x[j].v[i];
            x[j].v[i] = other;
        }
    }
}

inline void fetch(const void*) {}
inline void fetch_second(const void*) {}
