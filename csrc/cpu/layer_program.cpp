#include "octavo/layer_program.h"

#include <cmath>
#include <utility>

#include "program_room.h"

namespace octavo {
struct LayerProgram::Product : Operation {
    Slice to, from;
    Weight weight;
    TensorRef bias;
    bool accumulate = false;

    void run(const Frame& f) const override {
        run_linear(f.thread, f.threads,
                   {weight, f.at(from, 0), f.apart(from), f.inputs.digits, f.inputs.bf16, f.room.tokens, f.at(to, 0),
                    f.apart(to), bias.as<float>(), accumulate});
    }
};

namespace {

void check_options(const AttentionOptions& options, std::int64_t num_heads) {
    require(options.window >= 0 && std::isfinite(options.scale) && options.soft_cap >= 0, "options", "are impossible");
    check_bias(options, num_heads);
}

}  // namespace

LayerProgram::LayerProgram(std::int64_t hidden, std::int64_t width) : hidden_(hidden), width_(width) {
    require(hidden > 0 && hidden < kMostElements, "hidden", "is no number of states");
    require(width >= 0 && width < kMostElements, "width", "is out of range");
}

LayerProgram::~LayerProgram() = default;

void LayerProgram::inside(const Slice& slice, const char* name) const {
    const bool of_states = slice.at == Slice::kStates;
    require(slice.at >= Slice::kStates && slice.at <= width_ && slice.apart >= 0 && slice.apart <= width_, name,
            "lies outside");
    require(of_states || slice.apart <= width_ - slice.at, name, "lies outside");
    const std::int64_t end = of_states ? hidden_ : slice.apart;
    require(slice.first >= 0 && slice.first <= end && slice.count > 0 && slice.count <= end - slice.first, name,
            "lies outside");
}

// `to` is written while other threads read the others.
void LayerProgram::apart(const Slice& to, const char* name, std::initializer_list<Slice> from,
                         const char* names) const {
    inside(to, name);
    for (const Slice& slice : from) {
        inside(slice, names);
        require(!overlap(to, slice), name, "overlaps with what is read");
    }
}

void LayerProgram::norm(const Slice& to, const Slice& from, const TensorRef& weight, float eps, std::int64_t size,
                        const Slice& gate, bool gate_first) {
    inside(from, "from");
    inside(to, "to");
    as_wide(to, from.count, "to");
    require(size > 0 && from.count % size == 0, "size", "does not divide the numbers");
    expect(weight, "weight", {kAny}, DType::kF32);
    require(weight.shape[0] == size || weight.shape[0] == from.count, "weight", "has another width");
    const std::int64_t step = weight.shape[0] == size ? 0 : size;
    if (gate.count > 0) {
        inside(gate, "gate");
        as_wide(gate, from.count, "gate");
    }
    add_row([=](const Frame& f, std::int64_t t) {
        const float* x = f.at(from, t);
        float* out = f.at(to, t);
        if (gate.count > 0 && gate_first) {
            f.k.silu_mul(f.at(gate, t), x, from.count, out);
            x = out;
        }
        for (std::int64_t i = 0; i < from.count; i += size) {
            f.k.rms_norm(x + i, weight.as<float>() + i / size * step, eps, size, out + i);
        }
        if (gate.count > 0 && !gate_first) {
            f.k.silu_mul(f.at(gate, t), out, from.count, out);
        }
    });
}

void LayerProgram::layer_norm(const Slice& to, const Slice& from, const TensorRef& weight, const TensorRef& bias,
                              float eps) {
    inside(from, "from");
    inside(to, "to");
    as_wide(to, from.count, "to");
    require(from.count % 8 == 0, "from", "is no multiple of 8 numbers");
    floats(weight, from.count, "weight");
    floats(bias, from.count, "bias");
    add_row([=](const Frame& f, std::int64_t t) {
        f.k.layer_norm(f.at(from, t), weight.as<float>(), bias.as<float>(), eps, from.count, f.at(to, t));
    });
}

void LayerProgram::activate(const Slice& to, Activation kind) {
    inside(to, "to");
    add_row([=](const Frame& f, std::int64_t t) { f.k.activate(kind, f.at(to, t), to.count, f.at(to, t)); });
}

void LayerProgram::silu_mul(const Slice& to, const Slice& gate, const Slice& up) {
    for (const Slice& slice : {to, gate, up}) {
        inside(slice, "gate");
        as_wide(slice, to.count, "gate");
    }
    add_row([=](const Frame& f, std::int64_t t) { f.k.silu_mul(f.at(gate, t), f.at(up, t), to.count, f.at(to, t)); });
}

void LayerProgram::sigmoid_mul(const Slice& to, const Slice& gate, const Slice& x) {
    for (const Slice& slice : {to, gate, x}) {
        inside(slice, "gate");
        as_wide(slice, to.count, "gate");
    }
    add_row([=](const Frame& f, std::int64_t t) { f.k.sigmoid_mul(f.at(gate, t), f.at(x, t), to.count, f.at(to, t)); });
}

void LayerProgram::multiply(const Slice& to, const Slice& by) {
    inside(to, "to");
    inside(by, "by");
    as_wide(by, to.count, "by");
    add_row([=](const Frame& f, std::int64_t t) {
        float* x = f.at(to, t);
        const float* y = f.at(by, t);
        for (std::int64_t i = 0; i < to.count; ++i) {
            x[i] *= y[i];
        }
    });
}

void LayerProgram::scale(const Slice& to, const TensorRef& by) {
    inside(to, "to");
    expect(by, "by", {kAny}, DType::kF32);
    require(by.shape[0] == 1 || by.shape[0] == to.count, "by", "has another width");
    const std::int64_t step = by.shape[0] == 1 ? 0 : 1;
    add_row([=](const Frame& f, std::int64_t t) {
        float* x = f.at(to, t);
        for (std::int64_t i = 0; i < to.count; ++i) {
            x[i] *= by.as<float>()[i * step];
        }
    });
}

void LayerProgram::add(const Slice& to, const Slice& from, float times) {
    inside(to, "to");
    inside(from, "from");
    as_wide(from, to.count, "from");
    add_row([=](const Frame& f, std::int64_t t) {
        float* x = f.at(to, t);
        const float* y = f.at(from, t);
        for (std::int64_t i = 0; i < to.count; ++i) {
            x[i] += y[i] * times;
        }
    });
}

void LayerProgram::take(const Slice& to, const Slice& from, const TensorRef& indices) {
    apart(to, "to", {from}, "from");
    expect(indices, "indices", {to.count}, DType::kI64);
    for (std::int64_t i = 0; i < to.count; ++i) {
        const std::int64_t index = indices.as<std::int64_t>()[i];
        require(index >= 0 && index < from.count, "indices", "name a number that is not there");
    }
    add_row([=](const Frame& f, std::int64_t t) {
        float* out = f.at(to, t);
        const float* x = f.at(from, t);
        for (std::int64_t i = 0; i < to.count; ++i) {
            out[i] = x[indices.as<std::int64_t>()[i]];
        }
    });
}

void LayerProgram::linear(const Slice& to, const Slice& from, const Weight& weight, const TensorRef& bias,
                          bool accumulate) {
    apart(to, "to", {from}, "from");
    require(from.count == weight.cols && to.count == weight.rows, "weight", "has another shape");
    if (bias.given()) {
        floats(bias, weight.rows, "bias");
    }
    if (weight.rounding != Rounding::kNone && !(same(last_rounded_, from) && last_rounding_ == weight.rounding)) {
        add_row(
            [=](const Frame& f, std::int64_t t) { round_inputs(weight, f.at(from, t), t, 0, weight.cols, f.inputs); });
        last_rounded_ = from;
        last_rounding_ = weight.rounding;
        rounded_ = std::max(rounded_, weight.cols);
    }
    auto product = std::make_unique<Product>();
    product->to = to;
    product->from = from;
    product->weight = weight;
    product->bias = bias;
    product->accumulate = accumulate;
    operations_.push_back(std::move(product));
    last_rounded_ = overlap(last_rounded_, to) ? Slice{} : last_rounded_;
}

void LayerProgram::attend(const Slice& to, const Slice& queries, const Slice& keys, const Slice& values,
                          std::int64_t layer, std::int64_t head_dim, std::int64_t rotated,
                          const AttentionOptions& options) {
    apart(to, "to", {queries, keys, values}, "queries");
    require(head_dim > 0 && queries.count % head_dim == 0 && keys.count % head_dim == 0, "head_dim",
            "does not divide queries or keys");
    as_wide(to, queries.count, "to");
    as_wide(values, keys.count, "values");
    require(queries.count % keys.count == 0, "queries", "have heads that do not share those of keys");
    require(layer >= 0 && layer < kMostElements, "layer", "is negative");
    require(rotated >= 0 && rotated % 2 == 0 && rotated <= head_dim, "rotated", "is not an even number of dimensions");
    check_options(options, queries.count / head_dim);
    auto made = std::make_unique<Attention>(to, queries, keys, values);
    made->layer = layer;
    made->head_dim = head_dim;
    made->rotated = rotated;
    made->options = options;
    layers_ = std::max(layers_, layer + 1);
    rotated_ = std::max(rotated_, rotated);
    const Attention* attention = made.get();
    add_row([attention](const Frame& f, std::int64_t t) { attention->place(f, t); });
    operations_.push_back(std::move(made));
}

void LayerProgram::keep(const Slice& keys, const Slice& values, std::int64_t layer, std::int64_t head_dim) {
    inside(keys, "keys");
    inside(values, "values");
    as_wide(values, keys.count, "values");
    require(layer >= 0 && layer < kMostElements, "layer", "is negative");
    auto made = std::make_unique<Keeping>();
    made->keys = keys;
    made->values = values;
    made->layer = layer;
    made->head_dim = head_dim;
    layers_ = std::max(layers_, layer + 1);
    operations_.push_back(std::move(made));
}

void LayerProgram::attend_crossed(const Slice& to, const Slice& queries, std::int64_t layer, std::int64_t head_dim,
                                  const AttentionOptions& options) {
    apart(to, "to", {queries}, "queries");
    require(head_dim > 0 && queries.count % head_dim == 0, "head_dim", "does not divide queries");
    as_wide(to, queries.count, "to");
    require(layer >= 0 && layer < kMostElements, "layer", "is negative");
    check_options(options, queries.count / head_dim);
    auto made = std::make_unique<Attention>(to, queries, Slice{}, Slice{});
    made->layer = layer;
    made->head_dim = head_dim;
    made->options = options;
    made->crossed = true;
    layers_ = std::max(layers_, layer + 1);
    last_rounded_ = overlap(last_rounded_, to) ? Slice{} : last_rounded_;
    operations_.push_back(std::move(made));
}

void LayerProgram::run(const TensorRef& states, ProgramRoom& room, const TensorRef& cos, const TensorRef& sin) const {
    ProgramRoom::Inside& inside = *room.inside_;
    require(inside.tokens >= 0, "room", "has no step");
    const std::int64_t tokens = inside.tokens;
    expect(states, "states", {tokens, hidden_}, DType::kF32);
    expect_apart(states, "states", {&cos, &sin});
    require(volume({tokens, width_}) < kMostElements, "states", "has more tokens than there is memory for");
    require(layers_ <= static_cast<std::int64_t>(inside.layers.size()), "room", "lacks a layer of keys and values");
    require(state_bytes_ <= inside.states.num_bytes(), "room", "lacks states");
    if (rotated_ > 0) {
        expect(cos, "cos", {tokens, kAny}, DType::kF32);
        expect(sin, "sin", {tokens, kAny}, DType::kF32);
        require(cos.shape[1] >= rotated_ / 2, "cos", "has fewer columns than rotated / 2");
        require(sin.shape[1] >= rotated_ / 2, "sin", "has fewer columns than rotated / 2");
    }
    if (tokens == 0) {
        return;
    }
    for (const auto& operation : operations_) {
        operation->prepare(inside);
    }
    const std::int64_t blocks = num_blocks(tokens, rounded_);
    float* memory = inside.memory.take(width_ * tokens);
    const Inputs inputs{inside.digits.take(blocks), inside.bf16.take(blocks)};
    Pool& pool = Pool::instance();
    const int threads = pool.size();
    pool.run([&](PoolThread& thread) {
        const Frame frame{thread, threads, kernels(), inside, states, cos, sin, memory, inputs};
        for (const auto& operation : operations_) {
            operation->run(frame);
        }
    });
}

}  // namespace octavo
