#include "octavo/llama.h"

#include <utility>

#include "bind.h"
#include "tensor.h"

namespace py = pybind11;
using namespace py::literals;

namespace octavo::bind {
namespace {

template <typename T>
void take(const py::dict& values, const char* name, T& field) {
    if (values.contains(name)) {
        field = values[name].cast<T>();
    }
}

LlamaSizes sizes_of(const py::dict& values) {
    LlamaSizes sizes;
    take(values, "vocab", sizes.vocab);
    take(values, "hidden", sizes.hidden);
    take(values, "inner", sizes.inner);
    take(values, "heads", sizes.heads);
    take(values, "kv_heads", sizes.kv_heads);
    take(values, "head_dim", sizes.head_dim);
    take(values, "eps", sizes.eps);
    take(values, "scale", sizes.scale);
    return sizes;
}

LlamaLayer layer_of(const py::dict& values) {
    LlamaLayer layer;
    take(values, "input_norm", layer.input_norm);
    take(values, "mlp_norm", layer.mlp_norm);
    take(values, "qkv", layer.qkv);
    take(values, "out", layer.out);
    take(values, "gate_up", layer.gate_up);
    take(values, "down", layer.down);
    take(values, "qkv_bias", layer.qkv_bias);
    take(values, "out_bias", layer.out_bias);
    take(values, "gate_up_bias", layer.gate_up_bias);
    take(values, "down_bias", layer.down_bias);
    take(values, "q_norm", layer.q_norm);
    take(values, "k_norm", layer.k_norm);
    take(values, "window", layer.window);
    take(values, "rotated", layer.rotated);
    return layer;
}

struct Kv {
    std::vector<KvCache> layers;
};

}  // namespace

void bind_llama(py::module_& module) {
    py::class_<Kv>(module, "Kv", "The layers of an arena, looked at once; refers to their memory.")
        .def(py::init([](const py::list& layers) {
                 Kv kv;
                 for (const py::handle layer : layers) {
                     kv.layers.push_back(layer.cast<KvCache>());
                 }
                 return kv;
             }),
             "layers"_a, py::keep_alive<1, 2>());
    py::class_<Llama>(module, "Llama", "A decoder; refers to the memory of its tensors, which the caller keeps.")
        .def(py::init([](const py::dict& sizes, const Weight& embedding, const Weight& head, const TensorRef& norm,
                         const TensorRef& cos, const TensorRef& sin, const py::list& layers) {
                 std::vector<LlamaLayer> taken;
                 for (const py::handle layer : layers) {
                     taken.push_back(layer_of(py::reinterpret_borrow<py::dict>(layer)));
                 }
                 return new Llama(sizes_of(sizes), embedding, head, norm, cos, sin, std::move(taken));
             }),
             "sizes"_a, "embedding"_a, "head"_a, "norm"_a, "cos"_a, "sin"_a, "layers"_a)
        .def(
            "forward",
            [](Llama& llama, const TensorRef& hidden, const TensorRef& token_ids, const TensorRef& positions,
               const TensorRef& slots, const TensorRef& cu_q, const TensorRef& seq_lens, const TensorRef& block_tables,
               const TensorRef& rows, const Kv& kv) {
                const LlamaStep step{token_ids, positions, slots, {cu_q, seq_lens, block_tables}, rows};
                llama.forward(hidden, step, kv.layers);
            },
            "hidden"_a, "token_ids"_a, "positions"_a, "slots"_a, "cu_q"_a, "seq_lens"_a, "block_tables"_a, "rows"_a,
            "kv"_a, py::call_guard<py::gil_scoped_release>())
        .def("logits", &Llama::logits, "out"_a, "hidden"_a, py::call_guard<py::gil_scoped_release>());
}

}  // namespace octavo::bind
