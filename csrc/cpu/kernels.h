// The inner loops: one table of functions per instruction set. This header has plain data only, because the files that
// include it are compiled once per instruction set: the linker could take an inline function from the wrong one.
#pragma once

#include <cstdint>
#include <vector>

#include "octavo/activation.h"
#include "octavo/isa.h"
#include "octavo/weight.h"

namespace octavo {

// 32 inputs as whole numbers, each in two int8 digits: value = scale * (kDigit * high + low). Of numbers of 8 bits the
// high digits are zero, and products may leave them out. With 8 bits logits err by 0.9 % on average and
// 5 % at most; with 15 by 0.03 and 0.24 % (docs/measurements/kernels.md).
struct alignas(16) InputBlock {
    std::int8_t high[kBlock], low[kBlock];
    float scale;
    float scaled_sum;        // the sum of all rounded values
    std::int32_t sum;        // the sum of the numbers
    std::int32_t first_sum;  // of the first half of them; where a token has one scale, of all since its chunk began
};
// Where rows and tokens have one scale each, the products of so many blocks are summed up before they become floats:
// more would not fit 32 bits.
constexpr std::int64_t kChunkBlocks = 32;
constexpr std::int32_t kDigit = 128, kLargestDigit = 127, kLargestNumber = kLargestDigit * kDigit;
static_assert(kChunkBlocks * kBlock * 128 * kLargestNumber < std::int64_t{1} << 31);

// 32 inputs in bfloat16.
struct alignas(64) Bf16Block {
    std::uint16_t x[kBlock];
};

// Blocks of inputs lie as a product of that many columns reads them: [columns / kInputColumns, blocks, kInputColumns].
constexpr std::int64_t kInputColumns = 16;

// The place of the first of a column's `blocks`; the others follow at distances of kInputColumns.
static inline std::int64_t input_at(std::int64_t column, std::int64_t blocks) {
    return column / kInputColumns * kInputColumns * blocks + column % kInputColumns;
}

// What an adapter adds to the products of a column.
struct LowRank {
    const LoraPart* parts;
    std::int64_t count;  // of parts
    const float* low;
};

// y[column, row] (+)= sum over k of weight[row, k] * x[column, k] + bias[row]. In products of matrices a column is the
// inputs of one token, a row is one of the matrix, and k counts the matrix's own columns (`cols`).
// A result's bits depend neither on the number of columns nor on which rows are computed together.
struct LinearJob {
    Weight weight;
    const float* x;  // [columns, cols], for weights that take inputs as they are
    std::int64_t x_stride;
    // Rounded inputs, with room for a multiple of kInputColumns; what lies past `columns` is ignored.
    const InputBlock* digits;  // for weights whose inputs are rounded to 15 or 8 bits
    const Bf16Block* bf16;     // for weights whose inputs are rounded to bfloat16
    std::int64_t columns;
    float* y;  // [columns, rows]
    std::int64_t y_stride;
    const float* bias;  // [rows] or null
    bool accumulate;    // adds to y instead of overwriting it
    // Of each column, for weights that kernels add it to (adds_low_rank); null: nothing. The weight's rows begin with
    // row `low_row` of the adapters' stacks.
    const LowRank* low_rank = nullptr;
    std::int64_t low_row = 0;
    const void* next = nullptr;  // what is read after the last row of plain weights
};

// The job of `count` of its columns, from a multiple of kInputColumns on.
static inline LinearJob some_columns(LinearJob job, std::int64_t first, std::int64_t count) {
    const std::int64_t inputs = input_at(first, job.weight.cols / kBlock);
    job.x = job.x != nullptr ? job.x + first * job.x_stride : nullptr;
    job.digits = job.digits != nullptr ? job.digits + inputs : nullptr;
    job.bf16 = job.bf16 != nullptr ? job.bf16 + inputs : nullptr;
    job.low_rank = job.low_rank != nullptr ? job.low_rank + first : nullptr;
    job.columns = count;
    job.y += first * job.y_stride;
    return job;
}

// How a product is best divided: into multiples of `rows`, `most_rows` at most, that meet `columns` before others.
struct Division {
    std::int64_t rows, most_rows, columns;
};

// Where keys (or values) lie in blocks, for all layouts. Strides are counted in elements.
struct KvSide {
    char* data;
    std::int64_t block, head, slot;
    std::int64_t run, outer;  // so many dimensions follow each other; the next ones come `outer` later
    const float* scales;      // null: 1
    std::int64_t per_head;    // 0: one scale for all heads; 1: one for each
    char* slot_scales;        // float16, one for each slot, beside each other; null: none
    std::int64_t slot_scale_block, slot_scale_head;  // in bytes
};

constexpr std::int64_t kMostHeadDim = 1024;  // latent attention has 576

struct KvPages {
    KvSide keys, values;
    DType dtype;  // a float, kE4M3, kE5M2 or kI8
    std::int64_t num_blocks, num_heads, block_size, head_dim;
};

// Attention sums up the keys from one multiple of this to the next, and merges these sums in the order of keys, in
// items of one query as in those of many: a row's bits depend neither on the rows beside it nor on how a step is
// divided.
constexpr std::int64_t kSplitKeys = 1024;

// Attention over pages, shared by all items of a call.
struct AttentionJob {
    const float* queries;  // [tokens, heads, dim]
    std::int64_t query_token, query_head;
    float* out;  // [tokens, heads, dim]
    std::int64_t out_token, out_head;
    KvPages kv;
    std::int64_t group;  // query heads per key-value head
    float scale, soft_cap;
    std::int64_t window;  // 0: none
    const float* alibi;   // [heads] or null
    const float* sinks;   // [heads] or null
    // [heads, 2 * bias_reach + 1] or null: added to scores, by how far a key is after its query, at most the reach.
    const float* bias;
    std::int64_t bias_reach;
    bool both_ways;  // a query sees the keys after it, too
    // Block-sparse, unless vert_stride <= 1: a key is seen if its block is local or (block + offset) % vert_stride ==
    // 0.
    std::int64_t local_blocks, vert_stride, sparse_block;
    std::int64_t sparse_offset, sparse_head, sparse_kv_head;  // offset = first + head * one + kv head * the other
};

// Some queries of a sequence, for one key-value head: all their keys, or a range of them.
struct AttentionItem {
    const std::int32_t* table;
    std::int64_t kv_head;
    std::int64_t first_token;  // row of `queries`
    std::int64_t num_queries;
    std::int64_t first_position;  // of the first query
    std::int64_t first_key, end_key;
    // Null: writes to out. Else the keys are those of one split, and this is [num_queries * group, dim + 2]: sums,
    // maximum, weight.
    float* partial;
};

// Tokens that read and change a matrix of each head, one after another (octavo/api.h, linear_recurrence). What belongs
// to a token is dense, and that of the next one begins `..._apart` floats later.
struct RecurrenceJob {
    float* out;
    float* state;
    const float *queries, *keys, *values, *decays;
    const float* rates;  // null: no delta rule
    std::int64_t tokens, heads, key_heads, group, key_dim, value_dim;
    bool decay_per_key;
    std::int64_t queries_apart, keys_apart, values_apart, decays_apart, rates_apart, out_apart;
};

// Channels of Mamba 1, each of which has `dim` numbers: a token fades them by exp(rates * step), adds keys * step *
// value, and reads them by its queries; what is read has skip * value added. A token's numbers begin `..._apart` floats
// behind those of the one before.
struct ScanJob {
    float *out, *state;           // [count], [count, dim]
    const float *queries, *keys;  // [dim]
    const float *values, *steps;  // [count]
    const float *rates, *skips;   // [count, dim], [count]
    std::int64_t tokens, count, dim;
    std::int64_t out_apart, queries_apart, keys_apart, values_apart, steps_apart;
};

struct Kernels {
    Isa isa;
    void (*linear)(const LinearJob& job, std::int64_t first_row, std::int64_t end_row, float* scratch);
    std::int64_t (*linear_scratch)(const LinearJob& job);  // floats
    Division (*division)(const Weight& weight, std::int64_t columns);
    // Where a token has one scale, `count` is all of its inputs.
    void (*to_digits)(const float* x, std::int64_t count, Rounding rounding, InputBlock* to);
    void (*to_bf16_blocks)(const float* x, std::int64_t count, Bf16Block* to);
    void (*weight_row)(const Weight& weight, std::int64_t row, float* out);
    // `next`, if it is not null, will probably be computed then: its first keys are asked for.
    void (*attend)(const AttentionJob& job, const AttentionItem& item, const AttentionItem* next, float* scratch);
    std::int64_t (*attend_scratch)(const AttentionJob& job, std::int64_t num_queries);  // floats
    void (*merge)(const AttentionJob& job, const AttentionItem& item, std::int64_t num_parts, std::int64_t part_floats);
    void (*rms_norm)(const float* x, const float* weight, float eps, std::int64_t count, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, std::int64_t count,
                       float* out);  // of a multiple of 8 numbers
    void (*activate)(Activation kind, const float* x, std::int64_t count, float* out);
    void (*silu_mul)(const float* gate, const float* up, std::int64_t count, float* out);
    // gate, at most `limit`, times sigmoid(alpha * gate), times one more than `up`, which lies within +- limit.
    void (*clamped_swiglu)(const float* gate, const float* up, float alpha, float limit, std::int64_t count,
                           float* out);
    void (*write_slot)(const KvPages& pages, const KvSide& side, std::int64_t block, std::int64_t head,
                       std::int64_t slot, const float* row);
    void (*rotate)(const float* head, const float* cos, const float* sin, std::int64_t pairs, float* out);
    void (*to_float)(DType dtype, const void* from, std::int64_t count, float* to);
    void (*from_float)(DType dtype, const float* from, std::int64_t count, void* to);
    std::int64_t (*argmax)(const float* x,
                           std::int64_t count);  // lowest index of the maximum; of a NaN if there is one
    // Whether products with this weight add what adapters do: those whose inputs are digits, which ask for memory
    // while they compute.
    bool (*adds_low_rank)(const Weight& weight);
    // y[i] += sum over k of low[k] * b[k, first + i], for i below `count`. The order is that of k.
    void (*add_low_rank)(const LoraPart& part, std::int64_t first, std::int64_t count, const float* low, float* y);
    // All tokens, for some columns of one head's matrix. `scratch`: 8 * key_dim + count floats.
    void (*recur)(const RecurrenceJob& job, std::int64_t head, std::int64_t first, std::int64_t count, float* scratch);
    // All tokens, for some heads whose matrices have one column, without a delta rule.
    void (*recur_lines)(const RecurrenceJob& job, std::int64_t first_head, std::int64_t end_head);
    void (*scan)(const ScanJob& job);
    // out[i] = the sum over j, in that order, of seen[j][i] * taps[j * apart + i], and bias[i] unless it is null; silu
    // of that if wanted.
    void (*convolve)(const float* const* seen, const float* taps, std::int64_t apart, std::int64_t width,
                     const float* bias, bool silu, std::int64_t count, float* out);
    void (*sigmoid_mul)(const float* gate, const float* x, std::int64_t count, float* out);
    // steps = softplus(x + bias), not below `low` nor above `high`; decays = exp(rates * steps), unless rates are null.
    void (*fade)(const float* x, const float* bias, const float* rates, float low, float high, std::int64_t count,
                 float* steps, float* decays);
};

const Kernels* emulated_kernels();  // each is there if its instruction set was built (instruction_sets.cmake)
const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_kernels();

// The table in use: that of the best instruction set, unless select_isa chose another. ArgumentError if none was built
// that this machine runs.
const Kernels& kernels();

// What was built and this machine runs, the best one last.
std::vector<Isa> usable_isas();

// That of an instruction set. ArgumentError if this machine cannot run it, or if it was not built.
const Kernels& kernels_named(const char* name);

// Whether two tables make the same products of matrices with packed weights, to the bit, for some inputs that show
// wrong shapes, orders and tiles. Tables of which only one fuses products with sums do not agree.
bool agree(const Kernels& one, const Kernels& other);

// Chooses an instruction set, for tests and comparisons. ArgumentError if this machine cannot run it.
void select_isa(const char* name);

}  // namespace octavo
