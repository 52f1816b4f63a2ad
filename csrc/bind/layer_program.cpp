#include "octavo/layer_program.h"

#include <pybind11/stl.h>

#include <array>
#include <string>

#include "bind.h"
#include "kv.h"
#include "tensor.h"

namespace py = pybind11;
using namespace py::literals;

namespace octavo::bind {
namespace {

using Given = std::array<std::int64_t, 4>;  // at, apart, first, count

Slice slice(const Given& given) { return {given[0], given[1], given[2], given[3]}; }
RecurringSizes recurring(const Given& given) { return {given[0], given[1], given[2], given[3]}; }

Activation activation(const std::string& name) {
    require(name == "relu" || name == "gelu" || name == "gelu_tanh" || name == "silu", "kind", "is no activation");
    return name == "relu"        ? Activation::kRelu
           : name == "gelu"      ? Activation::kGelu
           : name == "gelu_tanh" ? Activation::kGeluTanh
                                 : Activation::kSilu;
}

}  // namespace

void bind_layer_program(py::module_& module) {
    const py::call_guard<py::gil_scoped_release> free;
    py::class_<ProgramRoom>(module, "ProgramRoom", "The step and the arena that programs of layers run on.")
        .def(py::init<>())
        .def(
            "use",
            [](ProgramRoom& room, const std::vector<TensorRef>& kv, const std::vector<TensorRef>& states,
               std::int64_t block_size) {
                std::vector<KvCache> caches(kv.size());
                for (std::size_t i = 0; i < kv.size(); ++i) {
                    caches[i].keys = kv[i];
                }
                room.use(caches, states, block_size);
            },
            "kv"_a, "states"_a, "block_size"_a)
        .def(
            "begin",
            [](ProgramRoom& room, const TensorRef& cu_q, const TensorRef& seq_lens, const TensorRef& block_tables,
               const TensorRef& slots, const TensorRef& starts, const TensorRef& crossed_cu_q,
               const TensorRef& crossed_lens, const TensorRef& crossed_tables) {
                room.begin({cu_q, seq_lens, block_tables, starts}, slots,
                           {crossed_cu_q, crossed_lens, crossed_tables, {}});
            },
            "cu_q"_a, "seq_lens"_a, "block_tables"_a, "slots"_a, "starts"_a = py::none(), "crossed_cu_q"_a = py::none(),
            "crossed_lens"_a = py::none(), "crossed_tables"_a = py::none());
    using P = LayerProgram;
    py::class_<P>(
        module, "LayerProgram",
        "Operations on the numbers of each token, one after another. A slice is (at, apart, first, count); the "
        "caller keeps tensors and weights.")
        .def(py::init<std::int64_t, std::int64_t>(), "hidden"_a, "width"_a)
        .def(
            "norm",
            [](P& p, const Given& to, const Given& from, const TensorRef& weight, float eps, std::int64_t size,
               const Given& gate,
               bool gate_first) { p.norm(slice(to), slice(from), weight, eps, size, slice(gate), gate_first); },
            "to"_a, "from_"_a, "weight"_a, "eps"_a, "size"_a, "gate"_a = Given{}, "gate_first"_a = false)
        .def(
            "layer_norm",
            [](P& p, const Given& to, const Given& from, const TensorRef& weight, const TensorRef& bias, float eps) {
                p.layer_norm(slice(to), slice(from), weight, bias, eps);
            },
            "to"_a, "from_"_a, "weight"_a, "bias"_a, "eps"_a)
        .def(
            "activate", [](P& p, const Given& to, const std::string& kind) { p.activate(slice(to), activation(kind)); },
            "to"_a, "kind"_a)
        .def(
            "silu_mul",
            [](P& p, const Given& to, const Given& gate, const Given& up) {
                p.silu_mul(slice(to), slice(gate), slice(up));
            },
            "to"_a, "gate"_a, "up"_a)
        .def(
            "sigmoid_mul",
            [](P& p, const Given& to, const Given& gate, const Given& x) {
                p.sigmoid_mul(slice(to), slice(gate), slice(x));
            },
            "to"_a, "gate"_a, "x"_a)
        .def(
            "multiply", [](P& p, const Given& to, const Given& by) { p.multiply(slice(to), slice(by)); }, "to"_a,
            "by"_a)
        .def(
            "scale", [](P& p, const Given& to, const TensorRef& by) { p.scale(slice(to), by); }, "to"_a, "by"_a)
        .def(
            "add", [](P& p, const Given& to, const Given& from, float times) { p.add(slice(to), slice(from), times); },
            "to"_a, "from_"_a, "times"_a)
        .def(
            "take",
            [](P& p, const Given& to, const Given& from, const TensorRef& indices) {
                p.take(slice(to), slice(from), indices);
            },
            "to"_a, "from_"_a, "indices"_a)
        .def(
            "linear",
            [](P& p, const Given& to, const Given& from, const Weight& weight, const TensorRef& bias, bool accumulate) {
                p.linear(slice(to), slice(from), weight, bias, accumulate);
            },
            "to"_a, "from_"_a, "weight"_a, "bias"_a = py::none(), "accumulate"_a = false)
        .def(
            "convolve",
            [](P& p, const Given& to, const Given& from, const TensorRef& taps, const TensorRef& bias, bool silu,
               std::int64_t place) { p.convolve(slice(to), slice(from), taps, bias, silu, {place}); },
            "to"_a, "from_"_a, "taps"_a, "bias"_a, "silu"_a, "place"_a)
        .def(
            "delta",
            [](P& p, const Given& to, const Given& queries, const Given& keys, const Given& values, const Given& fades,
               const Given& betas, const TensorRef& rates, const TensorRef& bias, float eps, const Given& sizes,
               std::int64_t place) {
                p.delta(slice(to), slice(queries), slice(keys), slice(values), slice(fades), slice(betas), rates, bias,
                        eps, recurring(sizes), {place});
            },
            "to"_a, "queries"_a, "keys"_a, "values"_a, "fades"_a, "betas"_a, "rates"_a, "bias"_a, "eps"_a, "sizes"_a,
            "place"_a)
        .def(
            "mamba2",
            [](P& p, const Given& to, const Given& queries, const Given& keys, const Given& values, const Given& fades,
               const Given& space, const TensorRef& rates, const TensorRef& bias, const TensorRef& skips, float low,
               float high, const Given& sizes, std::int64_t place) {
                p.mamba2(slice(to), slice(queries), slice(keys), slice(values), slice(fades), slice(space), rates, bias,
                         skips, low, high, recurring(sizes), {place});
            },
            "to"_a, "queries"_a, "keys"_a, "values"_a, "fades"_a, "space"_a, "rates"_a, "bias"_a, "skips"_a, "low"_a,
            "high"_a, "sizes"_a, "place"_a)
        .def(
            "mamba1",
            [](P& p, const Given& to, const Given& queries, const Given& keys, const Given& values, const Given& fades,
               const TensorRef& rates, const TensorRef& bias, const TensorRef& skips, std::int64_t place) {
                p.mamba1(slice(to), slice(queries), slice(keys), slice(values), slice(fades), rates, bias, skips,
                         {place});
            },
            "to"_a, "queries"_a, "keys"_a, "values"_a, "fades"_a, "rates"_a, "bias"_a, "skips"_a, "place"_a)
        .def(
            "attend",
            [](P& p, const Given& to, const Given& queries, const Given& keys, const Given& values, std::int64_t layer,
               std::int64_t head_dim, std::int64_t rotated, float scale, std::int64_t window, float soft_cap,
               const TensorRef& bias, bool both_ways) {
                AttentionOptions options;
                options.scale = scale;
                options.window = window;
                options.soft_cap = soft_cap;
                options.bias = bias;
                options.both_ways = both_ways;
                p.attend(slice(to), slice(queries), slice(keys), slice(values), layer, head_dim, rotated, options);
            },
            "to"_a, "queries"_a, "keys"_a, "values"_a, "layer"_a, "head_dim"_a, "rotated"_a, "scale"_a, "window"_a = 0,
            "soft_cap"_a = 0.0F, "bias"_a = py::none(), "both_ways"_a = false)
        .def(
            "keep",
            [](P& p, const Given& keys, const Given& values, std::int64_t layer, std::int64_t head_dim) {
                p.keep(slice(keys), slice(values), layer, head_dim);
            },
            "keys"_a, "values"_a, "layer"_a, "head_dim"_a)
        .def(
            "attend_crossed",
            [](P& p, const Given& to, const Given& queries, std::int64_t layer, std::int64_t head_dim, float scale) {
                AttentionOptions options;
                options.scale = scale;
                p.attend_crossed(slice(to), slice(queries), layer, head_dim, options);
            },
            "to"_a, "queries"_a, "layer"_a, "head_dim"_a, "scale"_a)
        .def("run", &P::run, "states"_a, "room"_a, "cos"_a = py::none(), "sin"_a = py::none(), free);
}

}  // namespace octavo::bind
