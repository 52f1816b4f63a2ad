#include "octavo/llama.h"

#include <pybind11/stl.h>

#include <mutex>
#include <utility>

#include "bind.h"
#include "kv.h"
#include "octavo/lora_room.h"
#include "tensor.h"

namespace py = pybind11;
using namespace py::literals;

namespace octavo::bind {
namespace {

// The values of a dict, each taken once.
class Values {
  public:
    Values(py::handle values, const char* name) : name_(name) {
        require(py::isinstance<py::dict>(values), name, "is not a dict");
        values_ = py::reinterpret_borrow<py::dict>(values).attr("copy")();
    }

    template <typename T>
    void take(const char* name, T& field) {
        if (values_.contains(name)) {
            try {
                field = values_.attr("pop")(name).cast<T>();
            } catch (const py::cast_error&) {
                throw ArgumentError(name, "is of another type");
            }
        }
    }

    // A tuple, because its weights stay as long as it does.
    void take(const char* name, Stack& field) {
        if (values_.contains(name)) {
            const py::object weights = values_.attr("pop")(name);
            require(py::isinstance<py::tuple>(weights), name, "is not a tuple of weights");
            for (const py::handle weight : weights) {
                require(py::isinstance<Weight>(weight), name, "has a part that is no weight");
                field.push_back(weight.cast<Weight>());
            }
        }
    }

    void end() const {
        for (const auto& [name, value] : values_) {
            throw ArgumentError(name_, "have nothing called " + py::str(name).cast<std::string>());
        }
    }

  private:
    const char* name_;
    py::dict values_;
};

// Empty: each head has keys and values.
LatentSizes latent_of(const py::dict& dict) {
    Values values(dict, "latent");
    LatentSizes latent;
    values.take("rank", latent.rank);
    values.take("query_rank", latent.query_rank);
    values.take("rotated", latent.rotated);
    values.take("plain", latent.plain);
    values.take("values", latent.values);
    values.take("eps", latent.eps);
    values.end();
    return latent;
}

LlamaSizes sizes_of(const py::dict& dict) {
    Values values(dict, "sizes");
    LlamaSizes sizes;
    values.take("vocab", sizes.vocab);
    values.take("hidden", sizes.hidden);
    values.take("inner", sizes.inner);
    values.take("heads", sizes.heads);
    values.take("kv_heads", sizes.kv_heads);
    values.take("head_dim", sizes.head_dim);
    values.take("eps", sizes.eps);
    values.take("scale", sizes.scale);
    values.take("embedding_scale", sizes.embedding_scale);
    values.take("asked_inner", sizes.asked_inner);
    values.take("gelu", sizes.gelu);
    values.take("attention_cap", sizes.attention_cap);
    values.take("logit_cap", sizes.logit_cap);
    values.take("post_norms", sizes.post_norms);
    values.take("sum_scale", sizes.sum_scale);
    values.take("logit_divisor", sizes.logit_divisor);
    py::dict latent;
    values.take("latent", latent);
    sizes.latent = latent_of(latent);
    values.end();
    return sizes;
}

void take_experts(Values& values, Experts& experts) {
    values.take("router", experts.router);
    values.take("router_bias", experts.router_bias);
    values.take("expert_gate_up", experts.gate_up);
    values.take("expert_down", experts.down);
    values.take("expert_gate_up_bias", experts.gate_up_bias);
    values.take("expert_down_bias", experts.down_bias);
    values.take("shared_gate_up", experts.shared_gate_up);
    values.take("shared_down", experts.shared_down);
    values.take("shared_gate", experts.shared_gate);
    values.take("top", experts.top);
    values.take("sigmoid", experts.sigmoid);
    values.take("shares_sum_to_one", experts.shares_sum_to_one);
    values.take("share_scale", experts.share_scale);
    values.take("router_correction", experts.correction);
    values.take("groups", experts.groups);
    values.take("top_groups", experts.top_groups);
    values.take("best_per_group", experts.best_per_group);
    values.take("swiglu_alpha", experts.alpha);
    values.take("swiglu_limit", experts.limit);
}

LlamaLayer layer_of(py::handle dict) {
    Values values(dict, "layers");
    LlamaLayer layer;
    values.take("input_norm", layer.input_norm);
    values.take("mlp_norm", layer.mlp_norm);
    values.take("attended_norm", layer.attended_norm);
    values.take("output_norm", layer.output_norm);
    values.take("qkv", layer.qkv);
    values.take("queries", layer.queries);
    values.take("latent_keys", layer.latent_keys);
    values.take("latent_values", layer.latent_values);
    values.take("out", layer.out);
    values.take("gate_up", layer.gate_up);
    values.take("down", layer.down);
    values.take("qkv_bias", layer.qkv_bias);
    values.take("out_bias", layer.out_bias);
    values.take("gate_up_bias", layer.gate_up_bias);
    values.take("down_bias", layer.down_bias);
    values.take("q_norm", layer.q_norm);
    values.take("k_norm", layer.k_norm);
    values.take("sinks", layer.sinks);
    values.take("window", layer.window);
    std::vector<std::int64_t> sparse;
    values.take("sparse", sparse);
    layer.sparse = block_sparse(sparse);
    values.take("rotated", layer.rotated);
    values.take("cos", layer.cos);
    values.take("sin", layer.sin);
    take_experts(values, layer.experts);
    values.end();
    return layer;
}

Span span_of(Values& values, const char* name) {
    std::pair<std::int64_t, std::int64_t> span;
    values.take(name, span);
    return {span.first, span.second};
}

std::vector<Span> spans_of(Values& values, const char* name) {
    Pairs pairs;
    values.take(name, pairs);
    return bind::spans_of(pairs);
}

// None: one rank computes everything.
LlamaShare share_of(const py::object& given) {
    LlamaShare share;
    if (!given.is_none()) {
        Values values(given, "share");
        values.take("team", share.team);
        require(share.team != nullptr, "share", "has no team");
        values.take("tokens", share.tokens);
        values.take("plan_bytes", share.plan_bytes);
        share.kv_heads = span_of(values, "kv_heads");
        share.heads = spans_of(values, "heads");
        share.hidden = span_of(values, "hidden");
        share.inner = span_of(values, "inner");
        share.vocab = span_of(values, "vocab");
        share.expert_inner = span_of(values, "expert_inner");
        share.shared_inner = span_of(values, "shared_inner");
        share.layers = span_of(values, "layers");
        values.take("hosts", share.hosts);
        values.take("loras", share.loras);
        share.host_hidden = spans_of(values, "host_hidden");
        share.host_inner = spans_of(values, "host_inner");
        share.host_vocab = spans_of(values, "host_vocab");
        share.host_expert_inner = spans_of(values, "host_expert_inner");
        share.host_shared_inner = spans_of(values, "host_shared_inner");
        values.end();
    }
    return share;
}

struct Adapter {
    py::tuple owners;  // of the memory
    Lora lora;
};

// (a, ((b, first), ...)): tuples, because their weights stay as long as they do.
LoraStack stack_of(py::handle given) {
    LoraStack stack;
    require(py::isinstance<py::tuple>(given) && py::len(given) == 2, "layers", "have no pair of a and parts");
    const auto pair = py::reinterpret_borrow<py::tuple>(given);
    require(py::isinstance<Weight>(pair[0]) && py::isinstance<py::tuple>(pair[1]), "layers", "have no weight a");
    stack.a = pair[0].cast<Weight>();
    std::int64_t low = 0;
    for (const py::handle part : pair[1]) {
        require(py::isinstance<py::tuple>(part) && py::len(part) == 2, "layers", "have a part that is no pair");
        const auto [b, first] = part.cast<std::pair<Weight, std::int64_t>>();
        stack.parts.push_back({b, first, low, 0});
        low += b.rows;
    }
    return stack;
}

LoraLayer lora_layer_of(py::handle dict) {
    LoraLayer layer;
    require(py::isinstance<py::dict>(dict), "layers", "are no dicts");
    for (const auto& [name, stack] : py::reinterpret_borrow<py::dict>(dict)) {
        const auto which = name.cast<std::string>();
        LoraStack* place = which == "qkv"       ? &layer.qkv
                           : which == "out"     ? &layer.out
                           : which == "gate_up" ? &layer.gate_up
                           : which == "down"    ? &layer.down
                                                : nullptr;
        require(place != nullptr, "layers", "have a stack of another name");
        *place = stack_of(stack);
    }
    return layer;
}

// ((adapter, count), ...)
std::vector<LoraGroup> groups_of(const py::tuple& given) {
    std::vector<LoraGroup> groups;
    for (const py::handle pair : given) {
        require(py::isinstance<py::tuple>(pair) && py::len(pair) == 2, "loras", "have no pair of adapter and count");
        const auto both = py::reinterpret_borrow<py::tuple>(pair);
        require(py::isinstance<Adapter>(both[0]), "loras", "have what is no adapter");
        groups.push_back({&both[0].cast<const Adapter&>().lora, both[1].cast<std::int64_t>()});
    }
    return groups;
}

struct Model {
    py::tuple owners;  // of the memory
    Llama llama;
    std::mutex mutex{};  // threads go in turn: a step has one workspace
};

// What the dicts hold now: changing them later must free nothing.
py::tuple values_of(const py::list& dicts) {
    py::list values;
    for (const py::handle dict : dicts) {
        values.append(py::tuple(dict.attr("values")()));
    }
    return py::tuple(values);
}

}  // namespace

void bind_llama(py::module_& module) {
    py::class_<Kv>(module, "Kv", "The layers of an arena, looked at once; refers to their memory, and keeps it.")
        .def(py::init([](const py::list& layers) {
                 Kv kv{py::tuple(layers), {}};
                 for (const py::handle layer : kv.owners) {
                     kv.layers.push_back(layer.cast<KvCache>());
                     usable(kv.layers.back().keys, "kv");
                 }
                 return kv;
             }),
             "layers"_a);
    py::class_<Adapter>(module, "Lora", "A low-rank adapter; refers to the memory of its tensors, and keeps it.")
        .def(py::init([](float scale, const py::list& layers) {
                 Lora lora;
                 lora.scale = scale;
                 for (const py::handle layer : layers) {
                     lora.layers.push_back(lora_layer_of(layer));
                 }
                 return Adapter{values_of(layers), std::move(lora)};
             }),
             "scale"_a, "layers"_a);
    py::class_<LoraRoom>(module, "LoraRoom", "Memory that all ranks map, in which the front puts adapters.")
        .def(py::init<const TensorRef&>(), "memory"_a, py::keep_alive<1, 2>())
        .def_static("table_bytes", &LoraRoom::table_bytes, "layers"_a)
        .def(
            "put", [](LoraRoom& room, Adapter& adapter, std::int64_t place) { room.put(adapter.lora, place); },
            "lora"_a, "place"_a, "In the front: all ranks may find it from here on. Its matrices lie in the memory.")
        .def(
            "drop", [](LoraRoom& room, std::int64_t first, std::int64_t count) { room.drop({first, count}); },
            "first"_a, "count"_a, "In the front: these bytes are of no adapter any more.");
    py::class_<Model>(module, "Llama", "A decoder; refers to the memory of its tensors, and keeps it.")
        .def(py::init([](const py::dict& sizes, const Weight& embedding, const Weight& head, const TensorRef& norm,
                         const TensorRef& cos, const TensorRef& sin, const py::list& layers, const py::object& share) {
                 std::vector<LlamaLayer> taken;
                 for (const py::handle layer : layers) {
                     taken.push_back(layer_of(layer));
                 }
                 const LlamaShare own = share_of(share);
                 const py::object kept = share.is_none() ? share : py::tuple(share.attr("values")());
                 return new Model{py::make_tuple(values_of(layers), kept),
                                  {sizes_of(sizes), embedding, head, norm, cos, sin, std::move(taken), own}};
             }),
             "sizes"_a, "embedding"_a, "head"_a, "norm"_a, "cos"_a, "sin"_a, "layers"_a, "share"_a = py::none(),
             py::keep_alive<1, 3>(), py::keep_alive<1, 4>(), py::keep_alive<1, 5>(), py::keep_alive<1, 6>(),
             py::keep_alive<1, 7>())
        .def(
            "forward",
            [](Model& model, const TensorRef& hidden, const TensorRef& token_ids, const TensorRef& positions,
               const TensorRef& slots, const TensorRef& cu_q, const TensorRef& seq_lens, const TensorRef& block_tables,
               const TensorRef& rows, const Kv& kv, const TensorRef& lora_rows, const py::tuple& loras,
               const TensorRef& picture_rows, const TensorRef& picture_states, const TensorRef& picture_cos,
               const TensorRef& picture_sin) {
                const LlamaStep step{{token_ids, positions, slots, {cu_q, seq_lens, block_tables}, rows, lora_rows, {}},
                                     groups_of(loras),
                                     {picture_rows, picture_states, picture_cos, picture_sin}};
                const py::gil_scoped_release free;
                const std::lock_guard<std::mutex> lock(model.mutex);
                model.llama.forward(hidden, step, kv.layers);
            },
            "hidden"_a, "token_ids"_a, "positions"_a, "slots"_a, "cu_q"_a, "seq_lens"_a, "block_tables"_a, "rows"_a,
            "kv"_a, "lora_rows"_a = py::none(), "loras"_a = py::tuple(), "picture_rows"_a = py::none(),
            "picture_states"_a = py::none(), "picture_cos"_a = py::none(), "picture_sin"_a = py::none())
        .def(
            "serve",
            [](Model& model, const Kv& kv, const TensorRef& arena) {
                const py::gil_scoped_release free;
                const std::lock_guard<std::mutex> lock(model.mutex);
                model.llama.serve(kv.layers, arena);
            },
            "kv"_a, "arena"_a, "Takes part in what the front computes, until the team is broken.")
        .def_static(
            "team_bytes",
            [](const py::dict& sizes, std::int64_t tokens, std::int64_t plan_bytes) {
                return Llama::team_bytes(sizes_of(sizes), tokens, plan_bytes);
            },
            "sizes"_a, "tokens"_a, "plan_bytes"_a, "How much memory a team of this model needs.")
        .def(
            "check_lora", [](const Model& model, const Adapter& adapter) { model.llama.check_lora(adapter.lora); },
            "lora"_a)
        .def_property_readonly(
            "shared_logits",
            [](const Model& model) -> py::object {
                const TensorRef logits = model.llama.shared_logits();
                const py::ssize_t rows = logits.shape[0], cols = logits.shape[1], size = sizeof(float);
                return logits.given()
                           ? py::memoryview::from_buffer(logits.as<float>(), {rows, cols}, {cols * size, size})
                           : py::object(py::none());
            },
            "Where a group makes logits, so that they need not be copied; else None.")
        .def(
            "logits",
            [](Model& model, const TensorRef& out, const TensorRef& hidden, const WantedLogits& wanted) {
                const std::lock_guard<std::mutex> lock(model.mutex);
                model.llama.logits(out, hidden, wanted);
            },
            "out"_a, "hidden"_a, "wanted"_a = WantedLogits(), py::call_guard<py::gil_scoped_release>());
}

}  // namespace octavo::bind
