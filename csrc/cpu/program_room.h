// What a program of layers runs on: the step's sequences, and where their states lie.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "attention.h"
#include "buffer.h"
#include "linear.h"
#include "octavo/layer_program.h"
#include "rope.h"

namespace octavo {

constexpr std::int64_t kMostTaps = 16;

// Whether both are the same numbers of each token.
inline bool same(const Slice& a, const Slice& b) {
    return a.at == b.at && a.apart == b.apart && a.first == b.first && a.count == b.count;
}

// Whether some number of some token is in both. Matrices that share memory, but not their rows, count as overlapping.
inline bool overlap(const Slice& a, const Slice& b) {
    const bool states = a.at == Slice::kStates || b.at == Slice::kStates;
    if (a.at == b.at && (states || a.apart == b.apart)) {
        return a.first < b.first + b.count && b.first < a.first + a.count;
    }
    return !states && a.count > 0 && b.count > 0 && a.at < b.at + b.apart && b.at < a.at + a.apart;
}

inline void as_wide(const Slice& slice, std::int64_t count, const char* name) {
    require(slice.count == count, name, "has another width");
}

inline const float* floats(const TensorRef& tensor, std::int64_t count, const char* name) {
    expect(tensor, name, {count}, DType::kF32);
    return tensor.as<float>();
}

// The bytes of states in the blocks of an arena: those of a block go on from one layer of the arena to the next.
class StatePages {
  public:
    StatePages() = default;
    explicit StatePages(const std::vector<TensorRef>& layers);
    std::int64_t num_bytes() const { return layer_bytes_ * static_cast<std::int64_t>(layers_.size()); }
    std::int64_t num_blocks() const { return blocks_; }

    // Where these bytes lie, or null: they lie in two layers.
    char* at(std::int64_t block, std::int64_t first, std::int64_t bytes) const {
        const std::int64_t layer = first / layer_bytes_, offset = first % layer_bytes_;
        return offset + bytes <= layer_bytes_ ? layers_[static_cast<std::size_t>(layer)] + block * apart_ + offset
                                              : nullptr;
    }

    void read(std::int64_t block, std::int64_t first, std::int64_t bytes, void* to) const {
        each(block, first, bytes, [to](char* memory, std::int64_t place, std::size_t count) {
            std::memmove(static_cast<char*>(to) + place, memory, count);
        });
    }

    // A piece's part of a state, to be changed by body(state) and kept: what the block before has of it (-1: zeros) is
    // there. `space`: for so many bytes, where they do not lie together.
    template <typename Body>
    void change(std::int64_t before, std::int64_t block, std::int64_t first, std::int64_t bytes, float* space,
                const Body& body) const {
        char* own = at(block, first, bytes);
        float* state = own == nullptr ? space : reinterpret_cast<float*>(own);
        if (before < 0) {
            std::memset(state, 0, static_cast<std::size_t>(bytes));
        } else if (own == nullptr || before != block) {
            read(before, first, bytes, state);
        }
        body(state);
        if (own == nullptr) {
            write(block, first, bytes, state);
        }
    }

    void write(std::int64_t block, std::int64_t first, std::int64_t bytes, const void* from) const {
        each(block, first, bytes, [from](char* memory, std::int64_t place, std::size_t count) {
            std::memmove(memory, static_cast<const char*>(from) + place, count);
        });
    }

  private:
    template <typename Body>
    void each(std::int64_t block, std::int64_t first, std::int64_t bytes, const Body& body) const {
        for (std::int64_t place = 0; place < bytes;) {
            const std::int64_t count = std::min(bytes - place, layer_bytes_ - (first + place) % layer_bytes_);
            body(at(block, first + place, count), place, static_cast<std::size_t>(count));
            place += count;
        }
    }

    std::vector<char*> layers_;
    std::int64_t layer_bytes_ = 1, apart_ = 0, blocks_ = 0;
};

// Tokens of a sequence that lie in one block, and the tokens of one sequence: [begin, end) of the step.
struct ProgramPiece {
    std::int64_t begin, end, block;
};
struct ProgramRun {
    std::int64_t begin, end;
    std::int64_t before;  // the block with the state before the first one; -1: there is none
    std::size_t first_piece, num_pieces;
};

struct ProgramRoom::Inside {
    std::vector<KvPages> layers;
    StatePages states;
    std::int64_t block_size = 0, tokens = -1;
    BatchRef batch, crossed;
    TensorRef slots;
    std::vector<ProgramPiece> pieces;
    std::vector<ProgramRun> runs;
    std::vector<std::size_t> run_of;                             // by token
    std::map<std::array<std::int64_t, 6>, AttentionPlan> plans;  // of the step
    Buffer<float> memory;
    Buffer<InputBlock> digits;
    Buffer<Bf16Block> bf16;
};

// What operations of a program see in one thread.
struct LayerProgram::Frame {
    PoolThread& thread;
    const int threads;
    const Kernels& k;
    ProgramRoom::Inside& room;
    const TensorRef &states, &cos, &sin;
    float* memory;
    const Inputs inputs;

    float* at(const Slice& slice, std::int64_t token) const {
        if (slice.at == Slice::kStates) {
            return states.as<float>() + token * states.stride[0] + slice.first;
        }
        return memory + slice.at * room.tokens + token * slice.apart + slice.first;
    }

    std::int64_t apart(const Slice& slice) const { return slice.at == Slice::kStates ? states.stride[0] : slice.apart; }
};

struct LayerProgram::Operation {
    virtual ~Operation() = default;
    virtual void prepare(ProgramRoom::Inside& /*room*/) const {}  // before threads run it, where it may throw
    virtual void run(const Frame& f) const = 0;                   // in every thread
};

// What is done with the numbers of each token by themselves.
struct LayerProgram::OnRows : Operation {
    std::vector<std::function<void(const Frame&, std::int64_t)>> rows;

    void run(const Frame& f) const override {
        f.thread.each(f.room.tokens, [&](std::int64_t token) {
            for (const auto& row : rows) {
                row(f, token);
            }
        });
    }
};

// Rows that follow each other are gone through together.
template <typename Row>
void LayerProgram::add_row(const Row& row) {
    last_rounded_ = {};
    auto* last = operations_.empty() ? nullptr : dynamic_cast<OnRows*>(operations_.back().get());
    if (last == nullptr) {
        operations_.push_back(std::make_unique<OnRows>());
        last = static_cast<OnRows*>(operations_.back().get());
    }
    last->rows.push_back(row);
}

struct LayerProgram::Convolution : Operation {
    Slice to, from;
    TensorRef taps, bias;
    bool silu;
    std::int64_t first;  // byte of the state
    void run(const Frame& f) const override;

  private:
    void make(const Frame& f, std::int64_t token, std::int64_t channel, std::int64_t count) const;
    void keep(const Frame& f, const ProgramRun& run, std::int64_t channel, std::int64_t count) const;
};

// What queries read of keys and values.
struct LayerProgram::Reading : Operation {
    Slice to, queries, keys, values;
    Reading(const Slice& t, const Slice& q, const Slice& k, const Slice& v) : to(t), queries(q), keys(k), values(v) {}
};

struct LayerProgram::Recurrence : Reading {
    using Reading::Reading;
    Slice decays, rates, inputs;
    bool delta;
    TensorRef skips;
    RecurringSizes sizes;
    std::int64_t first;  // byte of the state
    void run(const Frame& f) const override;

  private:
    void go_through(const Frame& f, const ProgramRun& run, std::int64_t head) const;
};

struct LayerProgram::Scan : Reading {
    using Reading::Reading;
    Slice steps;
    TensorRef rates, skips;
    std::int64_t first;  // byte of the state
    void run(const Frame& f) const override;

  private:
    void go_through(const Frame& f, const ProgramRun& run, std::int64_t channel, std::int64_t count) const;
};

struct LayerProgram::Attention : Reading {
    using Reading::Reading;
    std::int64_t layer, head_dim, rotated = 0;
    AttentionOptions options;
    bool crossed = false;  // to other sequences; keys and values are there
    void prepare(ProgramRoom::Inside& room) const override;
    void run(const Frame& f) const override;
    void place(const Frame& f, std::int64_t token) const;

  private:
    std::array<std::int64_t, 6> plan(const KvPages& pages) const;
};

// Keys and values of each token that are written into its slot.
struct LayerProgram::Keeping : Operation {
    Slice keys, values;
    std::int64_t layer, head_dim;
    void prepare(ProgramRoom::Inside& room) const override;
    void run(const Frame& f) const override;
};

}  // namespace octavo
