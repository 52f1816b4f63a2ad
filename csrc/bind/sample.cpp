#include "octavo/sample.h"

#include "bind.h"
#include "tensor.h"

namespace py = pybind11;
using namespace py::literals;

namespace octavo::bind {

// Columns that are looked at once and used for many steps; they refer to the memory of their tensors.
void bind_sample(py::module_& module) {
    using Ref = const TensorRef&;
    const py::keep_alive<1, 2> a;
    const py::keep_alive<1, 3> b;
    const py::keep_alive<1, 4> c;
    const py::keep_alive<1, 5> d;
    const py::keep_alive<1, 6> e;
    const py::keep_alive<1, 7> f;
    const py::keep_alive<1, 8> g;
    const py::keep_alive<1, 9> h;
    const py::keep_alive<1, 10> i;
    py::class_<Draws>(module, "Draws", "How each branch draws: columns.")
        .def(py::init([](Ref rows, Ref temperature, Ref top_k, Ref top_p, Ref min_p, Ref seed, Ref branch, Ref index) {
                 return Draws{rows, temperature, top_k, top_p, min_p, seed, branch, index};
             }),
             "rows"_a, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "seed"_a, "branch"_a, "index"_a, a, b, c, d, e,
             f, g, h);
    py::class_<Adjustments>(module, "Adjustments", "What changes the logits of each branch: lists.")
        .def(py::init([](Ref repetition, Ref seen_ends, Ref seen_ids, Ref seen_costs, Ref bias_ends, Ref bias_ids,
                         Ref biases, Ref allowed_ends, Ref allowed_ids) {
                 return Adjustments{repetition, seen_ends, seen_ids,     seen_costs, bias_ends,
                                    bias_ids,   biases,    allowed_ends, allowed_ids};
             }),
             "repetition"_a = py::none(), "seen_ends"_a = py::none(), "seen_ids"_a = py::none(),
             "seen_costs"_a = py::none(), "bias_ends"_a = py::none(), "bias_ids"_a = py::none(),
             "biases"_a = py::none(), "allowed_ends"_a = py::none(), "allowed_ids"_a = py::none(), a, b, c, d, e, f, g,
             h, i);
    py::class_<Scores>(module, "Scores", "Where log probabilities are put, of which branches.")
        .def(py::init([](Ref counts, Ref logprobs, Ref top_ids, Ref top_logprobs) {
                 return Scores{counts, logprobs, top_ids, top_logprobs};
             }),
             "counts"_a = py::none(), "logprobs"_a = py::none(), "top_ids"_a = py::none(),
             "top_logprobs"_a = py::none(), a, b, c, d);
}

}  // namespace octavo::bind
