// Products of plain weights with several columns, on registers of sixteen floats: two columns side by side, each with
// the sums that dense_tile makes in a register of eight.
//
// Inputs are laid out so for all rows of a turn, some columns at a time (a slab), which the second cache keeps. Eight
// rows meet all columns of a slab before the next eight, in chunks of k, which the first cache keeps.

constexpr std::int64_t kFewestPaired = 6;  // columns
constexpr std::int64_t kPairedRows = 8;
constexpr std::int64_t kPairs = 3;         // 8 x 3 sums in 32 registers
constexpr std::int64_t kPairedChunk = 80;  // eights of k, at most; chunks of a row are about as long as each other
constexpr std::int64_t kHighTurn = 1024;   // rows
constexpr std::int64_t kPairedSums = kPairedRows * kPairs * 16;

inline std::int64_t eights_of(const LinearJob& job) { return (job.weight.cols + 7) / 8; }

inline std::int64_t paired_columns(const LinearJob& job) {
    const std::int64_t fits = kSlabOfFloats / (32 * eights_of(job)) / (2 * kPairs) * (2 * kPairs);
    const std::int64_t most = fits > 0 ? fits : 2 * kPairs;
    return job.columns < most ? job.columns : most;
}

std::int64_t paired_scratch(const LinearJob& job) {
    const std::int64_t pairs = (paired_columns(job) + 1) / 2, panels = (pairs + kPairs - 1) / kPairs;
    return pairs * eights_of(job) * 16 + panels * kPairedSums + kPairedRows * job.weight.cols;
}

// Eight inputs of a column and eight of the next one, and so on. What is not there is zero.
inline void put_pair(const LinearJob& job, std::int64_t column, float* to, std::int64_t apart) {
    const std::int64_t whole = job.weight.cols / 8 * 8, rest = job.weight.cols - whole;
    for (std::int64_t c = 0; c < 2; ++c) {
        const float* x = job.x + (column + c) * job.x_stride;
        const bool there = column + c < job.columns;
        float* place = to + 8 * c;
        for (std::int64_t k = 0; k < whole; k += 8, place += apart) {
            store8(place, there ? load8(x + k) : zero8());
        }
        if (rest > 0) {
            store8(place, there ? load8_some(x + whole, rest) : zero8());
        }
    }
}

// Eight rows' weights of a chunk.
struct PairedChunk {
    const float* weights;
    std::int64_t stride, eights;
    std::int64_t rest;  // how many weights the last eight has; 0: all
    bool first, last;   // of the rows
};

// What follows in memory, for which panels ask while they are multiplied: so many bytes for an eight of k. A number of
// requests that changed within a panel would cost more than they bring: processors guess branches that never change.
struct NextRows {
    const char* at;
    std::int64_t step;
};

template <int kWide>
inline void add_pairs(const PairedChunk& chunk, const float* x, NextRows& next, __m512 (&sums)[kPairedRows][kWide]) {
    const float* w = chunk.weights;
    const std::int64_t stride = chunk.stride, whole = chunk.rest > 0 ? chunk.eights - 1 : chunk.eights;
    const auto add = [&](auto weights) __attribute__((always_inline)) {
        __m512 inputs[kWide];
#pragma GCC unroll 3
        for (int p = 0; p < kWide; ++p) {
            inputs[p] = _mm512_loadu_ps(x + 16 * p);
        }
#pragma GCC unroll 8
        for (int r = 0; r < kPairedRows; ++r) {
            const __m512 both = _mm512_broadcast_f32x8(weights(w + r * stride));
#pragma GCC unroll 3
            for (int p = 0; p < kWide; ++p) {
                sums[r][p] = _mm512_fmadd_ps(both, inputs[p], sums[r][p]);
            }
        }
    };
    const std::int64_t step = next.step;
    const char* ahead = next.at;
    for (std::int64_t k = 0; k < whole; ++k, w += 8, x += 16 * kWide, ahead += step) {
        for (std::int64_t line = 0; line < step; line += 64) {
            fetch_second(ahead + line);
        }
        add([](const float* p) __attribute__((always_inline)) { return load8(p); });
    }
    next.at = ahead;
    if (chunk.rest > 0) {
        add([&](const float* p) __attribute__((always_inline)) { return load8_some(p, chunk.rest); });
    }
}

// The sums of eight rows' registers, in the order of sum8: those of the first column, then those of the second.
inline __m512 sum_pairs(const __m512 (&rows)[kPairedRows]) {
    __m512 halves[4], quarters[2];
    for (int i = 0; i < 4; ++i) {  // lanes: row 2i of both columns, then row 2i + 1
        const __m512 a = rows[2 * i], b = rows[2 * i + 1];
        halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512d a = _mm512_castps_pd(halves[2 * i]), b = _mm512_castps_pd(halves[2 * i + 1]);
        quarters[i] =
            _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    const __m512 sums = _mm512_add_ps(_mm512_shuffle_ps(quarters[0], quarters[1], 0x88),
                                      _mm512_shuffle_ps(quarters[0], quarters[1], 0xdd));
    const __m512i places = _mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    return _mm512_permutexvar_ps(places, sums);
}

// kWide pairs of columns of eight rows. `kept`: where sums lie between chunks.
template <int kWide>
__attribute__((noinline)) void paired_tile(const LinearJob& job, const PairedChunk& chunk, const float* x,
                                           std::int64_t row, std::int64_t column, NextRows& next, float* kept) {
    __m512 sums[kPairedRows][kWide];
#pragma GCC unroll 8
    for (int r = 0; r < kPairedRows; ++r) {
#pragma GCC unroll 3
        for (int p = 0; p < kWide; ++p) {
            sums[r][p] = chunk.first ? _mm512_setzero_ps() : _mm512_loadu_ps(kept + (r * kWide + p) * 16);
        }
    }
    add_pairs(chunk, x, next, sums);
#pragma GCC unroll 3
    for (int p = 0; p < kWide; ++p) {
        __m512 rows[kPairedRows];
#pragma GCC unroll 8
        for (int r = 0; r < kPairedRows; ++r) {
            rows[r] = sums[r][p];
            if (!chunk.last) {
                _mm512_storeu_ps(kept + (r * kWide + p) * 16, sums[r][p]);
            }
        }
        const __m512 both = chunk.last ? sum_pairs(rows) : _mm512_setzero_ps();
        for (int c = 0; c < 2 && chunk.last && column + 2 * p + c < job.columns; ++c) {
            put_rows(job, column + 2 * p + c, row, Rows16::eight(both, c));
        }
    }
}

// Eight rows, of the columns of a slab.
template <Format kFormat>
void paired_rows(const LinearJob& job, std::int64_t row, std::int64_t column, std::int64_t columns, const float* x,
                 float* kept, float* widened) {
    constexpr std::int64_t kSize = kFormat == Format::kF32 ? 4 : 2;
    const std::int64_t cols = job.weight.cols, eights = eights_of(job), bytes = job.weight.stride * kSize;
    const std::int64_t pairs = (columns + 1) / 2, panels = (pairs + kPairs - 1) / kPairs;
    const char* rows = static_cast<const char*>(job.weight.data) + row * bytes;
    PairedChunk chunk{reinterpret_cast<const float*>(rows), job.weight.stride, 0, 0, true, false};
    if constexpr (kFormat != Format::kF32) {
        for (std::int64_t r = 0; r < kPairedRows; ++r) {
            to_float(kFormat == Format::kF16 ? DType::kF16 : DType::kBF16, rows + r * bytes, cols, widened + r * cols);
        }
        chunk.weights = widened;
        chunk.stride = cols;
    }
    const std::int64_t chunks = (eights + kPairedChunk - 1) / kPairedChunk, size = (eights + chunks - 1) / chunks;
    NextRows next{rows + kPairedRows * bytes, kPairedRows * bytes / (eights * panels)};
    for (std::int64_t first = 0; first < eights; first += chunk.eights, chunk.first = false) {
        chunk.eights = eights - first < size ? eights - first : size;
        chunk.last = first + chunk.eights == eights;
        chunk.rest = chunk.last ? cols % 8 : 0;
        for (std::int64_t panel = 0; panel < panels; ++panel) {
            const std::int64_t at = panel * kPairs, wide = pairs - at < kPairs ? pairs - at : kPairs;
            const float* inputs = x + (at * eights + first * wide) * 16;
            float* sums = kept + panel * kPairedSums;
            const auto tile = wide == 3 ? paired_tile<3> : wide == 2 ? paired_tile<2> : paired_tile<1>;
            tile(job, chunk, inputs, row, column + 2 * at, next, sums);
        }
        chunk.weights += chunk.eights * 8;
    }
}

// All rows but the last ones, which are fewer than eight: gives the first of these.
template <Format kFormat>
std::int64_t paired_turn(const LinearJob& job, std::int64_t row, std::int64_t end, float* scratch) {
    const std::int64_t most = paired_columns(job), eights = eights_of(job), last = end - (end - row) % kPairedRows;
    float* kept = scratch + (most + 1) / 2 * eights * 16;
    float* widened = kept + ((most + 1) / 2 + kPairs - 1) / kPairs * kPairedSums;
    for (std::int64_t column = 0; column < job.columns && row < last; column += most) {
        const std::int64_t columns = job.columns - column < most ? job.columns - column : most;
        const std::int64_t pairs = (columns + 1) / 2;
        for (std::int64_t pair = 0; pair < pairs; ++pair) {
            const std::int64_t at = pair / kPairs * kPairs, wide = pairs - at < kPairs ? pairs - at : kPairs;
            put_pair(job, column + 2 * pair, scratch + (at * eights + pair - at) * 16, wide * 16);
        }
        for (std::int64_t r = row; r < last; r += kPairedRows) {
            paired_rows<kFormat>(job, r, column, columns, scratch, kept, widened);
        }
    }
    return last;
}
