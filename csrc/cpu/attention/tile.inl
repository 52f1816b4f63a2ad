// The parts of a tile of keys: elements of the cache's type, rows of queries, and where keys and values lie.

constexpr std::int64_t kKeyTile = 32;
constexpr std::int64_t kGroups = kKeyTile / 8;
constexpr int kMostRows = 4;  // computed together
constexpr float kNone = -std::numeric_limits<float>::infinity();
constexpr float kLog2E = 1.44269504F;  // scores are kept in base 2

#if defined(__AVX512VL__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

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

// One query of one head, and what is known of it so far.
struct Row {
    const float* query;  // times what makes scores of products
    float* sums;         // [dim]
    float* weights;      // [kKeyTile]
    std::int64_t head, position;
    float maximum, total, rescale;
    std::int32_t low, high;  // which keys of the tile it looks at now
};

// Where the keys or the values of a tile lie in the cache, eight slots at a time.
struct Places {
    const char* at[kGroups];
    const char* scales[kGroups];  // float16 [8]; null: none
};

// How they are worked on.
enum class Form {
    kInPlace,  // from where they lie
    kRows,     // widened: [slot, dim]
    kColumns,  // widened, and each eight slots turned: [dim, 8]
};

struct Slots {
    Form form;
    DType type;
    std::int64_t stride;  // from one slot to the next, in bytes
    const char* const* at;
    const char* const* scales;
    const char* const* ahead;  // what lies there in the next tile; if there is none, in this one
};

// Room for a tile that is not worked on in place.
struct Room {
    float* floats;  // [kKeyTile, dim]
    const char* at[kGroups];
};

struct Scratch {
    Row* rows;
    float* queries;  // [rows, dim]
    float* sums;     // [rows, dim]
    float* weights;  // [rows, kKeyTile]
    float* eight;    // [8, dim]
    Room keys, values;
};

std::int64_t attend_scratch(const AttentionJob& job, std::int64_t num_queries) {
    const std::int64_t rows = num_queries * job.group, dim = job.kv.head_dim;
    return rows * (2 * dim + kKeyTile + static_cast<std::int64_t>(sizeof(Row) / 4)) + (2 * kKeyTile + 8) * dim;
}

inline Scratch split_scratch(const AttentionJob& job, std::int64_t rows, float* p) {
    const std::int64_t dim = job.kv.head_dim;
    Scratch s{};
    s.keys.floats = p;
    s.values.floats = s.keys.floats + kKeyTile * dim;
    s.eight = s.values.floats + kKeyTile * dim;
    s.queries = s.eight + 8 * dim;
    s.sums = s.queries + rows * dim;
    s.weights = s.sums + rows * dim;
    s.rows = reinterpret_cast<Row*>(s.weights + rows * kKeyTile);
    return s;
}
