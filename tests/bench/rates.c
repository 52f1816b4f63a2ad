/* Loops of one instruction, by which _rates.py finds what a core can do at most. Sources of vectors are zeros, those of
   tiles are not: with zeros a processor's clock stays up to a quarter faster. A C function's caller keeps no vector
   register, so nothing is told of those that change. */

#define TWELVE(each) each("0") each("1") each("2") each("3") each("4") each("5") \
                     each("6") each("7") each("8") each("9") each("10") each("11")
#define LOOP(name, each)                                          \
    void name(long rounds) {                                      \
        __asm__ volatile("vzeroall");                             \
        for (; rounds > 0; --rounds) __asm__ volatile(TWELVE(each)::); \
        __asm__ volatile("vzeroupper");                           \
    }

#define FMA512(to) "vfmadd231ps %%zmm13, %%zmm12, %%zmm" to "\n"
#define FMA256(to) "vfmadd231ps %%ymm13, %%ymm12, %%ymm" to "\n"
#define BF16(to) "vdpbf16ps %%zmm13, %%zmm12, %%zmm" to "\n"
#define VNNI(to) "vpdpbusd %%zmm13, %%zmm12, %%zmm" to "\n"
#define BYTES(to) "vpmaddubsw %%ymm13, %%ymm12, %%ymm" to "\n"
#define WORDS(to) "vpmaddwd %%ymm13, %%ymm12, %%ymm" to "\n"
LOOP(vfmadd512, FMA512)
LOOP(vfmadd256, FMA256)
LOOP(vdpbf16ps, BF16)
LOOP(vpdpbusd, VNNI)
LOOP(vpmaddubsw, BYTES)
LOOP(vpmaddwd, WORDS)

static const struct { /* eight tiles of 16 rows of 64 bytes */
    unsigned char palette, rest[15];
    unsigned short bytes[16];
    unsigned char rows[16];
} tiles = {1, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};

static unsigned short numbers[2][512]; /* as bfloat16 between 0.5 and 2, of both signs */
static void load_numbers(void) {
    for (unsigned i = 0; i < 1024; ++i) numbers[i / 512][i % 512] = 0x3f80 ^ (i * 40503 & 0x80ff);
    __asm__ volatile("tileloadd (%0,%2,1), %%tmm6\ntileloadd (%1,%2,1), %%tmm7" ::"r"(numbers[0]), "r"(numbers[1]), "r"(64L)
                     : "memory");
}
#define FOUR(each) each("0") each("1") each("2") each("3")
#define TILES(name, each)                                                       \
    void name(long rounds) {                                                    \
        __asm__ volatile("ldtilecfg %0" ::"m"(tiles));                          \
        load_numbers();                                                         \
        for (; rounds > 0; --rounds) __asm__ volatile(FOUR(each) FOUR(each) FOUR(each)::); \
        __asm__ volatile("tilerelease");                                        \
    }
#define TILE_BF16(to) "tdpbf16ps %%tmm7, %%tmm6, %%tmm" to "\n"
#define TILE_BYTES(to) "tdpbusd %%tmm7, %%tmm6, %%tmm" to "\n"
TILES(tdpbf16ps, TILE_BF16)
TILES(tdpbusd, TILE_BYTES)
