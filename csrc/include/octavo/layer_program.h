// Layers of a hybrid model as a list of what they do with the numbers of each token: norms, products, convolutions,
// recurrences, attention. One call runs it for the tokens of a step. gpu_worker/models/layer_programs writes such
// lists.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "octavo/activation.h"
#include "octavo/api.h"

namespace octavo {

// Some of the numbers that each token has: `count` from `first` on of a matrix with a row for each token. `at`: of how
// many floats per token that matrix lies behind others in the memory of a program; kStates: it is that of the states.
struct Slice {
    static constexpr std::int64_t kStates = -1;
    std::int64_t at = 0;
    std::int64_t apart = 0;  // from a row to the next
    std::int64_t first = 0, count = 0;
};

// What programs run on: a step's sequences, and the arena with their keys, values and states.
class ProgramRoom {
  public:
    ProgramRoom();
    ~ProgramRoom();

    // kv: a cache per layer with attention. states u8 [n, bytes]: the layers of the arena behind those. All keep their
    // memory until the next call.
    void use(const std::vector<KvCache>& kv, const std::vector<TensorRef>& states, std::int64_t block_size);

    // The sequences of the step that programs run from now on, and slots i64 [t]. crossed: the same tokens as other
    // sequences, whose keys are read by those operations that say so; or no data.
    void begin(const BatchRef& batch, const TensorRef& slots, const BatchRef& crossed = {});

  private:
    friend class LayerProgram;
    struct Inside;
    std::unique_ptr<Inside> inside_;
};

struct RecurringSizes {
    std::int64_t heads = 0, key_heads = 0, key_dim = 0, value_dim = 0;
};

// Only one thread may use a program, or programs of one room, at a time. It refers to the memory of its tensors, which
// must outlive it. Operations run in the order in which they were added; each throws ArgumentError if it does not fit.
// place: the first byte of what an operation keeps of the state in a block.
class LayerProgram {
  public:
    // hidden: of a token's states; width: floats per token of all other matrices.
    LayerProgram(std::int64_t hidden, std::int64_t width);
    ~LayerProgram();

    // to = rms_norm of each `weight` f32 [any] numbers of `from`, or with more of them than one weight.
    // gate, of as many numbers: silu(gate) is multiplied with it before the norm (`gate_first`) or after it.
    void norm(const Slice& to, const Slice& from, const TensorRef& weight, float eps, std::int64_t size,
              const Slice& gate, bool gate_first);
    // A norm of as many numbers, a multiple of 8, with a mean; weight, bias f32 [count].
    void layer_norm(const Slice& to, const Slice& from, const TensorRef& weight, const TensorRef& bias, float eps);
    void activate(const Slice& to, Activation kind);
    void silu_mul(const Slice& to, const Slice& gate, const Slice& up);
    void sigmoid_mul(const Slice& to, const Slice& gate, const Slice& x);
    void multiply(const Slice& to, const Slice& by);
    void scale(const Slice& to, const TensorRef& by);  // f32 [count] or [1]
    void add(const Slice& to, const Slice& from, float times);
    void take(const Slice& to, const Slice& from, const TensorRef& indices);  // i64
    // to = from * weight' + bias f32 [rows]; `accumulate` adds to what is there.
    void linear(const Slice& to, const Slice& from, const Weight& weight, const TensorRef& bias, bool accumulate);
    // Each number is made of those of as many tokens as there are taps f32 [width, count]. The state is f32
    // [width - 1, count]: the last inputs.
    void convolve(const Slice& to, const Slice& from, const TensorRef& taps, const TensorRef& bias, bool silu,
                  std::int64_t place);
    // The gated delta rule with normed queries and keys, which are changed: decays are exp(rates * softplus(fades +
    // bias)), and what is added is multiplied with sigmoid(betas). The state is f32 [heads, key_dim, value_dim].
    void delta(const Slice& to, const Slice& queries, const Slice& keys, const Slice& values, const Slice& fades,
               const Slice& betas, const TensorRef& rates, const TensorRef& bias, float eps,
               const RecurringSizes& sizes, std::int64_t place);
    // Mamba 2: steps are softplus(fades + bias) within limits, and decays exp(rates * steps); what is read has
    // skips f32 [heads] times the values added. space: as wide as the values.
    void mamba2(const Slice& to, const Slice& queries, const Slice& keys, const Slice& values, const Slice& fades,
                const Slice& space, const TensorRef& rates, const TensorRef& bias, const TensorRef& skips, float low,
                float high, const RecurringSizes& sizes, std::int64_t place);
    // Mamba 1: steps are softplus(fades + bias), and numbers of channels fade by exp(rates f32 [channels, dim] * step);
    // what is read has skips f32 [channels] times the values added. The state is f32 [channels, dim].
    void mamba1(const Slice& to, const Slice& queries, const Slice& keys, const Slice& values, const Slice& fades,
                const TensorRef& rates, const TensorRef& bias, const TensorRef& skips, std::int64_t place);
    // Turns the first `rotated` dimensions of queries and keys, keeps keys and values, and attends. layer: of the
    // caches.
    void attend(const Slice& to, const Slice& queries, const Slice& keys, const Slice& values, std::int64_t layer,
                std::int64_t head_dim, std::int64_t rotated, const AttentionOptions& options);
    // Only keeps keys and values, for what reads them later.
    void keep(const Slice& keys, const Slice& values, std::int64_t layer, std::int64_t head_dim);
    // Only attends, to the keys of the room's crossed sequences.
    void attend_crossed(const Slice& to, const Slice& queries, std::int64_t layer, std::int64_t head_dim,
                        const AttentionOptions& options);

    // states f32 [t, hidden] is changed. cos, sin f32 [t, any]: angles of the tokens, or no data.
    void run(const TensorRef& states, ProgramRoom& room, const TensorRef& cos, const TensorRef& sin) const;

  private:
    struct Frame;
    struct Operation;
    struct OnRows;
    struct Product;
    struct Convolution;
    struct Reading;
    struct Recurrence;
    struct Scan;
    struct Attention;
    struct Keeping;
    void inside(const Slice& slice, const char* name) const;
    void apart(const Slice& to, const char* name, std::initializer_list<Slice> from, const char* names) const;
    template <typename Row>
    void add_row(const Row& row);
    void keep_state(std::int64_t place, std::int64_t bytes);
    std::unique_ptr<Recurrence> recurrence(const Slice& to, const Slice& queries, const Slice& keys,
                                           const Slice& values, const Slice& fades, const RecurringSizes& sizes,
                                           std::int64_t place);

    std::int64_t hidden_, width_;
    std::int64_t rounded_ = 0;      // inputs of a column that are rounded, at most
    std::int64_t state_bytes_ = 0;  // of a block, that are used
    std::int64_t layers_ = 0;       // of caches that are used
    std::int64_t rotated_ = 0;      // dimensions
    Slice last_rounded_;            // and for which weight's rounding; count 0: nothing since then
    Rounding last_rounding_ = Rounding::kNone;
    std::vector<std::unique_ptr<Operation>> operations_;
};

}  // namespace octavo
