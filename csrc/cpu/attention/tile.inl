// The parts of a tile of keys: elements of the cache's type, rows of queries, and the memory that an item works in.

constexpr std::int64_t kKeyTile = 32;  // or less, see tile_keys
using KeyBits = std::uint32_t;         // one per key of a tile
constexpr std::int64_t kGroups = kKeyTile / 8;
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504F;  // scores are kept in base 2

// Eight elements as the kernels take them: e4m3 divided by kE4M3Factor, int8 without its scale.
template <DType kType>
inline F8 load8_as(const char* p) {
    if constexpr (kType == DType::kF32) {
        return load8(reinterpret_cast<const float*>(p));
    } else if constexpr (kType == DType::kF16) {
        return load8_f16(reinterpret_cast<const std::uint16_t*>(p));
    } else if constexpr (kType == DType::kBF16) {
        return load8_bf16(reinterpret_cast<const std::uint16_t*>(p));
    } else if constexpr (kType == DType::kE4M3) {
        return load8_e4m3(p);
    } else if constexpr (kType == DType::kE5M2) {
        return load8_e5m2(p);
    } else {
        return load8_i8(p);
    }
}

template <DType kType>
constexpr std::int64_t kSize = kType == DType::kF32                            ? 4
                               : kType == DType::kF16 || kType == DType::kBF16 ? 2
                                                                               : 1;

template <typename Do>
inline void with_type(DType type, const Do& run) {
    switch (type) {
        case DType::kF32:
            return run(std::integral_constant<DType, DType::kF32>());
        case DType::kF16:
            return run(std::integral_constant<DType, DType::kF16>());
        case DType::kBF16:
            return run(std::integral_constant<DType, DType::kBF16>());
        case DType::kE4M3:
            return run(std::integral_constant<DType, DType::kE4M3>());
        case DType::kE5M2:
            return run(std::integral_constant<DType, DType::kE5M2>());
        default:
            return run(std::integral_constant<DType, DType::kI8>());
    }
}

#include "lanes.inl"

// One query of one head, and what is known of it so far.
struct Row {
    std::int64_t head, position;
    KeyBits seen;  // bit j: it sees key j of the tile
};

// The keys of a tile that are computed: from the first to the last that any row sees, in whole steps of the form.
struct Range {
    std::int64_t from, end;
};

// What an item works in. Rows are computed in blocks of kMostBlock or less, and counted in whole steps of the form.
template <typename Form>
struct Scratch {
    using Number = typename Form::Number;

    std::int64_t dim;   // in whole steps
    std::int64_t tile;  // keys
    bool whole;         // all rows see all keys of the tile, whatever `seen` says
    Row* rows;
    float* sums;      // [rows, dim]
    float* totals;    // [rows, Lanes::kCount]: of weights, sums of every eighth one in the first eight
    float* maxima;    // [rows, and a register more]: the largest score of each so far
    Number* queries;  // [rows, dim]
    float* scores;    // [kSides, block, kKeyTile]; as floats they become weights
    Number* weights;  // [kSides, block, kKeyTile]
    Number* keys;     // dimensions, or pairs of them, apart: [dim, kKeyTile]
    Number* values;   // keys, or pairs of them, apart: [kKeyTile, dim]
    char* room;       // for kKeyTile keys or values, as they are in the cache
    float* merged;    // [rows, dim of a head + 2]: of the splits before this one, as a partial result has them
};

// Keys of a tile, on which the bits of a row depend. What is packed and what is asked for fit the first cache together.
inline std::int64_t tile_keys(const KvPages& pages) {
    return pages.dtype == DType::kF32 && pages.head_dim > 64 ? kKeyTile / 2 : kKeyTile;
}

constexpr std::int64_t kMostStep = 32, kMostBlock = 32;
constexpr std::int64_t kSides = 3;  // blocks that are worked on at once: scores, weights, and what is summed up

inline std::int64_t round_up(std::int64_t count, std::int64_t step) { return (count + step - 1) / step * step; }

std::int64_t attend_scratch(const AttentionJob& job, std::int64_t num_queries) {
    const std::int64_t rows = round_up(num_queries * job.group, kMostStep), dim = round_up(job.kv.head_dim, kMostStep);
    const auto row = static_cast<std::int64_t>(sizeof(Row) / 4);
    return rows * (3 * dim + 3 + Lanes::kCount + row) + Lanes::kCount + 2 * kSides * kMostBlock * kKeyTile +
           3 * kKeyTile * dim;
}

template <typename Form>
inline Scratch<Form> split_scratch(const AttentionJob& job, std::int64_t count, float* p) {
    using Number = typename Form::Number;
    const std::int64_t rows = round_up(count, Form::kRowStep), dim = round_up(job.kv.head_dim, Form::kDimStep);
    const auto floats = [&p](std::int64_t each) {
        float* taken = p;
        p += each;
        return taken;
    };
    const auto numbers = [&floats](std::int64_t each) {
        return reinterpret_cast<Number*>(floats(each * static_cast<std::int64_t>(sizeof(Number)) / 4));
    };
    Scratch<Form> s{};
    s.dim = dim;
    s.tile = tile_keys(job.kv);
    s.sums = floats(rows * dim);
    s.totals = floats(rows * Lanes::kCount);
    s.maxima = floats(round_up(rows, Lanes::kCount) + Lanes::kCount);
    s.queries = numbers(rows * dim);
    s.scores = floats(kSides * kMostBlock * kKeyTile);
    s.weights = sizeof(Number) == 4 ? reinterpret_cast<Number*>(s.scores) : numbers(kSides * kMostBlock * kKeyTile);
    s.keys = numbers(kKeyTile * dim);
    s.values = numbers(kKeyTile * dim);
    s.room = reinterpret_cast<char*>(floats(kKeyTile * dim));
    s.merged = floats(rows * (job.kv.head_dim + 2));
    s.rows = reinterpret_cast<Row*>(p);
    return s;
}
