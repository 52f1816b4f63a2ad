// AMX's tiles: eight registers of at most 16 rows of 64 bytes. add_bf16 and add_bytes multiply a tile of inputs (a
// row for each column of a product) with a tile of weights, and add to a tile of sums of 32 bits:
//   sums[m, n] += inputs[m, k] * weights[k, n], where the p neighbours of k that fill 32 bits (2 of bfloat16 or 4
//   bytes) lie beside each other in both: row k / p of the weights has [n, k % p].
// Where OCTAVO_EMULATED_TILES is defined the same operations are C++, so that every machine tests what is computed with
// them. A thread makes a Tiles before it works on tiles, and destroys it when it is done.

// As the processor reads it: palette 1, then bytes of a row and the number of rows of each tile.
struct alignas(64) TileShapes {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {};
    std::uint8_t rows[16] = {};

    constexpr TileShapes& put(int tile, std::uint8_t num_rows, std::uint16_t num_bytes) {
        rows[tile] = num_rows;
        bytes[tile] = num_bytes;
        return *this;
    }
};

#if defined(OCTAVO_EMULATED_TILES)

class Tiles {
  public:
    explicit Tiles(const TileShapes& shapes) : shapes_(shapes) {}

    template <int kTile>
    void zero() {
        std::memset(data_[kTile], 0, sizeof data_[kTile]);
    }
    template <int kTile>
    void load(const void* from, std::int64_t stride) {
        zero<kTile>();
        for (int row = 0; row < shapes_.rows[kTile]; ++row) {
            std::memcpy(data_[kTile] + 64 * row, static_cast<const char*>(from) + row * stride, shapes_.bytes[kTile]);
        }
    }
    template <int kTile>
    void pass(const void* from, std::int64_t stride) {
        load<kTile>(from, stride);
    }
    template <int kTile>
    void store(void* to, std::int64_t stride) const {
        for (int row = 0; row < shapes_.rows[kTile]; ++row) {
            std::memcpy(static_cast<char*>(to) + row * stride, data_[kTile] + 64 * row, shapes_.bytes[kTile]);
        }
    }
    // Numbers are bfloat16. Even and odd k are summed apart; the products themselves are exact in float32.
    template <int kSum, int kInputs, int kWeights>
    void add_bf16() {
        check<kSum, kInputs, kWeights>();
        const auto number = [&](int tile, int row, int i) {
            std::uint16_t bits;
            std::memcpy(&bits, data_[tile] + 64 * row + 2 * i, 2);
            return bf16_to_float(bits);
        };
        each<float>(kSum, [&](int m, int n, float& sum) {
            float even = 0, odd = 0;
            for (int k = 0; k < shapes_.rows[kWeights]; ++k) {
                even += number(kInputs, m, 2 * k) * number(kWeights, k, 2 * n);
                odd += number(kInputs, m, 2 * k + 1) * number(kWeights, k, 2 * n + 1);
            }
            sum += even + odd;
        });
    }
    // Signed inputs, unsigned weights.
    template <int kSum, int kInputs, int kWeights>
    void add_bytes() {
        check<kSum, kInputs, kWeights>();
        each<std::int32_t>(kSum, [&](int m, int n, std::int32_t& sum) {
            for (int k = 0; k < 4 * shapes_.rows[kWeights]; ++k) {
                const auto input = static_cast<std::int8_t>(data_[kInputs][64 * m + k]);
                sum += input * data_[kWeights][64 * (k / 4) + 4 * n + k % 4];
            }
        });
    }

  private:
    // The processor refuses shapes that do not fit.
    template <int kSum, int kInputs, int kWeights>
    void check() const {
        const auto& [palette, start, reserved, bytes, rows] = shapes_;
        if (palette != 1 || rows[kSum] != rows[kInputs] || bytes[kSum] != bytes[kWeights] ||
            bytes[kInputs] != 4 * rows[kWeights] || rows[kSum] > 16 || bytes[kSum] > 64) {
            __builtin_trap();
        }
    }
    template <typename T, typename Do>
    void each(int tile, const Do& run) {
        for (int m = 0; m < shapes_.rows[tile]; ++m) {
            for (int n = 0; n < shapes_.bytes[tile] / 4; ++n) {
                T value;
                std::memcpy(&value, data_[tile] + 64 * m + 4 * n, 4);
                run(m, n, value);
                std::memcpy(data_[tile] + 64 * m + 4 * n, &value, 4);
            }
        }
    }

    const TileShapes& shapes_;
    alignas(64) std::uint8_t data_[8][1024];
};

#else

// As assembly: the header's intrinsics take no template parameter for the number of a tile.
class Tiles {
  public:
    explicit Tiles(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" ::"m"(shapes)); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() { __asm__ volatile("tilerelease"); }

    template <int kTile>
    void zero() {
        __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
    }
    template <int kTile>
    void load(const void* from, std::int64_t stride) {
        __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
    }
    // The same, of what is read once: it goes past the first cache, and what is there stays.
    template <int kTile>
    void pass(const void* from, std::int64_t stride) {
        __asm__ volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
    }
    template <int kTile>
    void store(void* to, std::int64_t stride) const {
        __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
    }
    template <int kSum, int kInputs, int kWeights>
    void add_bf16() {
        __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kInputs), "i"(kWeights));
    }
    template <int kSum, int kInputs, int kWeights>
    void add_bytes() {
        __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSum), "i"(kInputs), "i"(kWeights));
    }
};

#endif
