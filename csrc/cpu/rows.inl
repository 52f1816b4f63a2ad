// One or two row groups of a packed matrix side by side in a register: what linear_packed.inl multiplies with. The same
// operations per row, so the same bits. p: the first group's part; the second one's lies `next` bytes further.

struct Rows8 {
    using F = F8;
    static constexpr int kGroups = 1;

    static F zero() { return zero8(); }
    static F set(float x) { return set8(x); }
    static F sub(F a, F b) { return sub8(a, b); }
    static F mul(F a, F b) { return mul8(a, b); }
    static F fma(F a, F b, F c) { return fma8(a, b, c); }
    static F eight(F x, int) { return x; }
    static F scales(const std::uint8_t* p, std::int64_t) { return load8_f16(reinterpret_cast<const std::uint16_t*>(p)); }
    static F pick(const std::uint8_t* p, std::int64_t, std::uint32_t shift, int mask) {
        return pick_of(words_of(p), shift, mask);
    }
    // The products of a block with kColumns blocks of numbers, which lie `stride` apart: integers, as floats.
    template <int kColumns>
    static void dots4(const std::uint8_t* p, std::int64_t, const std::int8_t* a, std::int64_t stride, F* dots) {
        const Nibbles n = nibbles_of(p);
        for (int c = 0; c < kColumns; ++c) {
            dots[c] = dot_nibbles(n, a + c * stride);
        }
    }
    template <int kColumns>
    static void dots8(const std::uint8_t* p, std::int64_t, const std::int8_t* a, std::int64_t stride,
                      const std::int32_t* sums, F* dots) {
        const Bytes b = bytes_of(p);
        for (int c = 0; c < kColumns; ++c) {
            dots[c] = dot_bytes(b, a + c * stride, sums[c]);
        }
    }
};

#if defined(__AVX512VNNI__) && defined(__AVX512F__)

// On 512 bits a product takes as long as two on 256, but half the loads of inputs.
struct Rows16 {
    using F = __m512;
    static constexpr int kGroups = 2;

    static F zero() { return _mm512_setzero_ps(); }
    static F set(float x) { return _mm512_set1_ps(x); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F8 eight(F x, int group) {
        return group == 0 ? _mm512_castps512_ps256(x) : _mm512_extractf32x8_ps(x, 1);
    }
    static __m512i load(const std::uint8_t* p, std::int64_t next) {
        const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + next));
        return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
    }
    static F scales(const std::uint8_t* p, std::int64_t next) {
        const __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m128i second = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + next));
        return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1));
    }
    static F pick(const std::uint8_t* p, std::int64_t next, std::uint32_t shift, int mask) {
        const __m512i shifted = _mm512_srlv_epi32(load(p, next), _mm512_set1_epi32(static_cast<int>(shift)));
        return _mm512_cvtepi32_ps(_mm512_and_si512(shifted, _mm512_set1_epi32(mask)));
    }
    template <int kColumns>
    static void dots4(const std::uint8_t* p, std::int64_t next, const std::int8_t* a, std::int64_t stride, F* dots) {
        const __m512i mask = _mm512_set1_epi8(15);
        Sums<kColumns> sums;
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512i both = load(p + 32 * i, next);
            sums.add(0, _mm512_and_si512(both, mask), a + 4 * i, stride);
            sums.add(1, _mm512_and_si512(_mm512_srli_epi16(both, 4), mask), a + 16 + 4 * i, stride);
        }
        sums.finish(dots);
    }
    template <int kColumns>
    static void dots8(const std::uint8_t* p, std::int64_t next, const std::int8_t* a, std::int64_t stride,
                      const std::int32_t* offsets, F* dots) {
        Sums<kColumns> sums;
        sums.begin(offsets);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            sums.add(i % 2, load(p + 32 * i, next), a + 4 * i, stride);
        }
        sums.finish(dots);
    }

  private:
    // A step goes over all columns before the next: sums that wait for each other would fill the scheduler. Few columns
    // have two sums each.
    template <int kColumns>
    struct Sums {
        static constexpr int kChains = kColumns < 4 ? 2 : 1;
        __m512i sum[kChains][kColumns];

        Sums() {
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                sum[0][c] = sum[kChains - 1][c] = _mm512_setzero_si512();
            }
        }
        void begin(const std::int32_t* sums) {
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                sum[0][c] = _mm512_set1_epi32(-128 * sums[c]);
            }
        }
        void add(int chain, __m512i weights, const std::int8_t* a, std::int64_t stride) {
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                std::int32_t four;
                std::memcpy(&four, a + c * stride, 4);
                __m512i& to = sum[chain % kChains][c];
                to = _mm512_dpbusd_epi32(to, weights, _mm512_set1_epi32(four));
            }
        }
        void finish(F* dots) const {
#pragma GCC unroll 16
            for (int c = 0; c < kColumns; ++c) {
                dots[c] = _mm512_cvtepi32_ps(kChains == 1 ? sum[0][c] : _mm512_add_epi32(sum[0][c], sum[1][c]));
            }
        }
    };
};

using Rows = Rows16;

#else

using Rows = Rows8;

#endif
