// gpu_worker._C_cuda: the CUDA half of the extension. The simulator's module for tests, _C_cuda_simt, is compiled from
// this file, too.
//
// A tensor is a tuple (address, type, shape, strides in elements) whose type is a number of octavo::DType; None is a
// tensor that is not given. A stream is an integer. The ops check their arguments. The GIL is released while they queue
// their work.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "cuda/api.h"
#include "cuda/device.h"
#include "cuda/swap.h"
#include "plan/attention_plan.h"
#ifdef OCTAVO_SIMT
#include "simt/cuda_runtime.h"
#include "simt/probes.h"
#endif

namespace py = pybind11;
using octavo::DType;
using octavo::TensorRef;
using namespace octavo::cuda;

namespace pybind11::detail {

template <>
struct type_caster<TensorRef> {
    PYBIND11_TYPE_CASTER(TensorRef, const_name("tuple | None"));

    bool load(handle source, bool) {
        if (source.is_none()) {
            return true;
        }
        if (!isinstance<tuple>(source)) {
            return false;
        }
        const auto parts = reinterpret_borrow<tuple>(source);
        if (parts.size() != 4) {
            return false;
        }
        const auto shape = parts[2].cast<tuple>(), stride = parts[3].cast<tuple>();
        if (shape.size() != stride.size()) {
            return false;
        }
        value.problem = read(parts[0].cast<std::uintptr_t>(), parts[1].cast<int>(), shape, stride);
        return true;
    }

  private:
    // Why it is no tensor an op can work with.
    const char* read(std::uintptr_t address, int dtype, const tuple& shape, const tuple& stride) {
        if (dtype < 0 || dtype > static_cast<int>(DType::kI64)) {
            return "is of a type no op here takes";
        }
        if (shape.size() > octavo::kMaxDims) {
            return "has more than six dimensions";
        }
        value.data = reinterpret_cast<void*>(address);
        value.dtype = static_cast<DType>(dtype);
        value.ndim = static_cast<int>(shape.size());
        for (std::size_t i = 0; i < shape.size(); ++i) {
            value.shape[i] = shape[i].cast<std::int64_t>();
            value.stride[i] = stride[i].cast<std::int64_t>();
            if (value.shape[i] < 0 || (value.shape[i] > 1 && value.stride[i] < 0)) {
                return "has a negative size or stride";
            }
            if (value.shape[i] > INT32_MAX) {
                return "has a dimension that is not below 2^31";
            }
        }
        if (value.size() == 0) {
            return nullptr;
        }
        return address == 0 ? "is missing" : device_problem(value.data);
    }
};

}  // namespace pybind11::detail

namespace {

StreamHandle stream_of(std::uintptr_t stream) { return reinterpret_cast<StreamHandle>(stream); }

// After an op has returned: the simulator runs the null stream, whose results the caller may read at once.
void settle([[maybe_unused]] std::uintptr_t stream) {
#ifdef OCTAVO_SIMT
    octavo::simt::settle(stream);
#endif
}

// Queues an op: its last argument is the stream, as an integer.
template <auto kOp>
struct Queued;
template <typename... Arguments, void (*kOp)(Arguments...)>
struct Queued<kOp> {
    template <typename Tuple, std::size_t... kPlaces>
    static auto make(std::index_sequence<kPlaces...>) {
        return [](std::decay_t<std::tuple_element_t<kPlaces, Tuple>>... arguments, std::uintptr_t stream) {
            const py::gil_scoped_release release;
            kOp(arguments..., stream_of(stream));
            settle(stream);
        };
    }
};

template <auto kOp, typename... Arguments>
void define(py::module_& module, const char* name, void (*)(Arguments...), const char* text) {
    module.def(
        name,
        Queued<kOp>::template make<std::tuple<Arguments...>>(std::make_index_sequence<sizeof...(Arguments) - 1>{}),
        text);
}
// Ops of _C_cpu, with its arguments: what is written comes first.
namespace ordered {

void copy_blocks(const TensorRef& source, const TensorRef& target, const TensorRef& pairs, StreamHandle stream) {
    octavo::cuda::copy_blocks(source, target, pairs, 0, stream);
}
void gather_blocks(const TensorRef& staging, const TensorRef& arena, const TensorRef& ids, std::int64_t begin,
                   StreamHandle stream) {
    octavo::cuda::gather_blocks(arena, ids, staging, begin, stream);
}
void scatter_blocks(const TensorRef& arena, const TensorRef& staging, const TensorRef& ids, std::int64_t begin,
                    StreamHandle stream) {
    octavo::cuda::scatter_blocks(arena, ids, staging, begin, stream);
}
void checksum_blocks(const TensorRef& sums, const TensorRef& arena, const TensorRef& ids, StreamHandle stream) {
    octavo::cuda::checksum_blocks(arena, ids, sums, stream);
}

}  // namespace ordered

#define OCTAVO_ORDERED(NAME, TEXT) define<&ordered::NAME>(module, #NAME, &ordered::NAME, TEXT)
#define OCTAVO_OP(NAME, TEXT) define<&octavo::cuda::NAME>(module, #NAME, &octavo::cuda::NAME, TEXT)

// The plan as bytes, for one copy to the device: slots, then items.
py::tuple pack_plan(const octavo::plan::Plan& plan) {
    return py::make_tuple(
        py::bytes(reinterpret_cast<const char*>(plan.slots.data()), 4 * plan.slots.size()),
        py::bytes(reinterpret_cast<const char*>(plan.items.data()), sizeof(octavo::plan::Item) * plan.items.size()),
        plan.num_partials);
}

// Throws unless a plan can have these lengths.
void check_lengths(const std::vector<std::int32_t>& q_lens, const std::vector<std::int32_t>& kv_lens,
                   const octavo::plan::Shape& shape) {
    constexpr std::int64_t kMostKeys = 1 << 30, kMostItems = 1 << 26;
    std::int64_t tokens = 0, keys = 0;
    for (std::size_t i = 0; i < q_lens.size(); ++i) {
        octavo::require(q_lens[i] >= 0, "q_lens", "has a negative length");
        octavo::require(kv_lens[i] >= 0 && kv_lens[i] <= kMostKeys, "kv_lens", "has a length that cannot be");
        octavo::require(kv_lens[i] == 0 || kv_lens[i] >= q_lens[i], "kv_lens", "is less than a sequence's queries");
        tokens += q_lens[i];
        keys = std::max<std::int64_t>(keys, kv_lens[i]);
    }
    const auto sequences = static_cast<std::int64_t>(q_lens.size());
    octavo::require(
        tokens <= kMostKeys / shape.group && octavo::plan::max_items(sequences, tokens, shape, keys) <= kMostItems,
        "q_lens", "has more queries than any launch");
}

octavo::plan::Shape shape_of(int num_heads, int group, int rows, int num_slots, int window, int fixed_piece,
                             double even_enough) {
    constexpr int kMost = 1 << 20;
    const std::pair<const char*, int> positive[] = {
        {"kv_heads", num_heads}, {"group", group}, {"rows", rows}, {"num_slots", num_slots}};
    for (const auto& [name, number] : positive) {
        octavo::require(number > 0 && number <= kMost, name, "is not positive, or too large");
    }
    octavo::require(window >= 0, "window", "is negative");
    octavo::require(fixed_piece >= 0 && fixed_piece <= kMost, "fixed_piece", "is negative, or too large");
    octavo::require(even_enough >= 0, "even_enough", "is negative");  // or NaN
    octavo::plan::Shape shape;
    shape.num_heads = num_heads;
    shape.group = group;
    shape.rows = rows;
    shape.num_slots = num_slots;
    shape.window = window;
    shape.fixed_piece = fixed_piece;
    shape.even_enough = even_enough;
    return shape;
}

void bind_types(py::module_& module) {
    py::class_<KvCache>(module, "KvCache", "A layer of keys and values in blocks.")
        .def(py::init([](const TensorRef& keys, const TensorRef& values, const std::string& type,
                         const TensorRef& key_scale,
                         const TensorRef& value_scale) { return KvCache{keys, values, type, key_scale, value_scale}; }),
             py::arg("keys"), py::arg("values"), py::arg("type") = "auto", py::arg("key_scale") = py::none(),
             py::arg("value_scale") = py::none());
    py::class_<Attention>(module, "Attention", "How scores are made.")
        .def(py::init([](float scale, float soft_cap, int window, const TensorRef& alibi, const TensorRef& sinks,
                         const std::vector<int>& sparse) {
                 Attention attention{scale, soft_cap, window, alibi, sinks, {}};
                 if (sparse.size() == 5) {
                     attention.sparse = {sparse[0], sparse[1], sparse[2], sparse[3], sparse[4]};
                 } else if (!sparse.empty()) {
                     throw octavo::ArgumentError(
                         "sparse", "is not (local_blocks, vert_stride, block_size, head_sliding_step, tp_rank)");
                 }
                 return attention;
             }),
             py::arg("scale"), py::arg("soft_cap") = 0.0F, py::arg("window") = 0, py::arg("alibi") = py::none(),
             py::arg("sinks") = py::none(), py::arg("sparse") = std::vector<int>{});
    py::class_<PlanRef>(module, "Plan", "Where a plan lies on the device.")
        .def(py::init([](const TensorRef& slots, const TensorRef& items, const TensorRef& counters,
                         const TensorRef& partials) { return PlanRef{slots, items, counters, partials}; }),
             py::arg("slots"), py::arg("items"), py::arg("counters"), py::arg("partials"));
    const py::call_guard<py::gil_scoped_release> free;
    py::class_<Swapper>(module, "Swapper", "Copies blocks on a stream of its own; tickets say when it is done.")
        .def(py::init<std::int64_t>(), py::arg("room") = 1 << 16)
        .def(
            "start",
            [](Swapper& self, const TensorRef& source, const TensorRef& target,
               const std::vector<std::pair<std::int64_t, std::int64_t>>& pairs, std::uintptr_t after,
               std::int64_t small_run) { return self.start(source, target, pairs, stream_of(after), small_run); },
            py::arg("source"), py::arg("target"), py::arg("pairs"), py::arg("after") = 0,
            py::arg("small_run") = 28 * 1024, free)
        .def("done", &Swapper::done, free)
        .def(
            "let_wait",
            [](Swapper& self, std::int64_t ticket, std::uintptr_t stream) {
                self.let_wait(ticket, stream_of(stream));
                settle(stream);
            },
            free)
        .def("wait", &Swapper::wait, free);
}

void bind_plans(py::module_& module) {
    module.def(
        "plan_attention",
        [](const std::vector<std::int32_t>& q_lens, const std::vector<std::int32_t>& kv_lens, int kv_heads, int group,
           int rows, int num_slots, int window, int fixed_piece, double even_enough) {
            if (q_lens.size() != kv_lens.size()) {
                throw octavo::ArgumentError("kv_lens", "is not as long as q_lens");
            }
            const auto shape = shape_of(kv_heads, group, rows, num_slots, window, fixed_piece, even_enough);
            check_lengths(q_lens, kv_lens, shape);
            return pack_plan([&] {
                const py::gil_scoped_release free;
                return octavo::plan::plan_attention(q_lens, kv_lens, shape);
            }());
        },
        py::arg("q_lens"), py::arg("kv_lens"), py::arg("kv_heads"), py::arg("group"), py::arg("rows"),
        py::arg("num_slots"), py::arg("window") = 0, py::arg("fixed_piece") = 0, py::arg("even_enough") = 1.0,
        "(slots, items, number of partials); slots and items are int32 as bytes.");
    module.def(
        "plan_capacity",
        [](std::int64_t sequences, std::int64_t tokens, int kv_heads, int group, int rows, int num_slots,
           int fixed_piece, std::int64_t keys) {
            for (const auto& [name, number] : {std::pair{"sequences", sequences}, {"tokens", tokens}, {"keys", keys}}) {
                octavo::require(number >= 0 && number <= 1 << 30, name, "cannot be");
            }
            const auto shape = shape_of(kv_heads, group, rows, num_slots, 0, fixed_piece, 1.0);
            return std::make_pair(octavo::plan::max_items(sequences, tokens, shape, keys),
                                  octavo::plan::max_partials(sequences, tokens, shape, keys));
        },
        py::arg("sequences"), py::arg("tokens"), py::arg("kv_heads"), py::arg("group"), py::arg("rows"),
        py::arg("num_slots"), py::arg("fixed_piece") = 0, py::arg("keys") = 0,
        "The most items and partials that a plan can have.");
    module.def(
        "attention_kernel",
        [](const std::string& kernel, int dtype, const std::string& kv, int dim, int rows) {
            octavo::require(dtype >= 0 && dtype <= static_cast<int>(DType::kBF16), "dtype", "is not of a float type");
            octavo::require(dim > 0, "head_dim", "is not positive");
            octavo::require(rows > 0, "rows", "is not positive");
            const KernelShape shape = attention_kernel(kernel, static_cast<DType>(dtype), kv, dim, rows);
            return std::make_pair(shape.rows, shape.slots);
        },
        py::arg("kernel"), py::arg("dtype"), py::arg("kv_type"), py::arg("head_dim"), py::arg("rows"),
        "(rows of a tile, thread blocks that run at once), for sequences of at most `rows` rows per kv head.");
}

}  // namespace

#ifdef OCTAVO_SIMT
void bind_runtime(py::module_&& module) {
    namespace simt = octavo::simt;
    module.def("hold_null_stream", &simt::hold_null_stream);
    module.def("synchronize", &simt::synchronize);
    module.def("make_stream", &simt::make_stream);
    module.def("end_stream", &simt::end_stream);
    module.def("take_calls", &simt::take_calls);
    module.def("fail_after", &simt::fail_after);
    module.def("lose_device", &simt::lose_device);
    module.def("last_error", &simt::last_error);
    module.def("choose_device", &simt::choose_device);
    module.def("choose_versions", &simt::choose_versions);
    module.def("live", &simt::live);
    module.def("place_memory", &simt::place_memory);
    define<&simt::ring_probe>(module, "ring_probe", &simt::ring_probe, "(out, x, stream)");
    define<&simt::last_block_probe>(module, "last_block_probe", &simt::last_block_probe,
                                    "(out, x, room, counter, stream)");
}
#endif

PYBIND11_MODULE(OCTAVO_MODULE, module) {
    module.doc() = "octavo's CUDA kernels";
    module.def("device_count", &device_count, "How many CUDA devices there are; 0 without a driver.");
    module.def("unsupported", &unsupported, py::arg("device"),
               "Why the kernels cannot run on a device: it, or the driver, is too old. Empty: they can.");
    module.def("multiplies_fp8", &multiplies_fp8, py::arg("device"),
               "Whether the kernels that run on a device can multiply fp8 (linear_fp8).");
    py::register_local_exception<octavo::ArgumentError>(module, "ArgumentError", PyExc_ValueError);
    module.def("take_fault", &take_fault,
               "What kernels that have ended found wrong with numbers on the device (its argument, and the problem), "
               "once; None: nothing. Does not wait.");
    bind_types(module);
    bind_plans(module);
#ifdef OCTAVO_SIMT
    bind_runtime(module.def_submodule("runtime"));
#else
    module.attr("bindings") = OCTAVO_BINDINGS;
#endif
    OCTAVO_OP(cache_write, "(kv, keys, values, slots, stream)");
    OCTAVO_OP(rope_cache_write,
              "(kv, queries, keys, values, positions, cos, sin, rotated, slots, interleaved, stream)");
    OCTAVO_ORDERED(copy_blocks, "(source, target, pairs, stream)");
    OCTAVO_ORDERED(gather_blocks, "(staging, arena, ids, begin, stream)");
    OCTAVO_ORDERED(scatter_blocks, "(arena, staging, ids, begin, stream)");
    OCTAVO_ORDERED(checksum_blocks, "(sums, arena, ids, stream)");
    OCTAVO_OP(convert_fp8, "(target, source, scale, type, stream)");
    OCTAVO_OP(rms_norm, "(out, x, weight, eps, stream)");
    OCTAVO_OP(fused_add_rms_norm, "(x, residual, weight, eps, stream)");
    OCTAVO_OP(silu_and_mul, "(out, x, stream)");
    OCTAVO_OP(linear, "(out, x, weight, bias, stream)");
    OCTAVO_OP(linear_packed, "(out, x, weight, format, bias, stream)");
    OCTAVO_OP(round_inputs, "(out, x, group, scale, stream)");
    OCTAVO_OP(linear_fp8, "(out, x, weight, bias, stream)");
    OCTAVO_OP(sample, "(ids, logits, temperature, top_k, top_p, min_p, filters, seed, branch, index, stream)");
    OCTAVO_OP(penalize, "(logits, offsets, ids, counts, bias, repetition, presence, frequency, stream)");
    OCTAVO_OP(logprobs, "(chosen, values, tokens, logits, ids, stream)");
    OCTAVO_OP(paged_attention, "(kernel, rows, out, queries, kv, tables, cu_q, lens, plan, attention, stream)");
    OCTAVO_OP(vllm_paged_attention,
              "(out, exp_sums, max_logits, tmp_out, queries, kv, tables, lens, max_len, partition, attention, stream)");
}
