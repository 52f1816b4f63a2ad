#include "octavo/part_sum.h"

#include <cstring>
#include <vector>

#include "bind.h"
#include "octavo/tensor.h"

namespace py = pybind11;
using namespace py::literals;

namespace octavo::bind {
namespace {

// The bytes of a Python object, held. py::buffer_info would allocate three times for each; a part has a run per layer.
class Bytes {
  public:
    Bytes(py::handle object, int flags) {
        if (PyObject_GetBuffer(object.ptr(), &view_, flags) != 0) {
            throw py::error_already_set();
        }
    }
    Bytes(Bytes&& other) noexcept : view_(other.view_) { other.view_.obj = nullptr; }
    Bytes(const Bytes&) = delete;
    Bytes& operator=(const Bytes&) = delete;
    Bytes& operator=(Bytes&&) = delete;
    ~Bytes() { PyBuffer_Release(&view_); }

    char* data() const { return static_cast<char*>(view_.buf); }
    std::size_t size() const { return static_cast<std::size_t>(view_.len); }

  private:
    Py_buffer view_{};
};

void add_part(py::handle totals, std::uint64_t seed, std::uint64_t offset, const py::sequence& runs) {
    const Bytes sums(totals, PyBUF_WRITABLE);
    require(sums.size() == part_sum::kStripeBytes, "totals", "does not have 64 bytes");
    require(offset % part_sum::kStripeBytes == 0, "offset", "is not a multiple of 64");
    std::vector<Bytes> held;
    std::vector<part_sum::Run> parts;
    held.reserve(runs.size());
    parts.reserve(runs.size());
    for (const py::handle run : runs) {
        held.emplace_back(run, PyBUF_SIMPLE);
        parts.push_back({held.back().data(), held.back().size()});
    }
    std::uint64_t values[part_sum::kTotals];
    std::memcpy(values, sums.data(), sizeof values);
    {
        const py::gil_scoped_release free;
        part_sum::add(values, seed, offset / part_sum::kStripeBytes, parts.data(), parts.size());
    }
    std::memcpy(sums.data(), values, sizeof values);
}

std::uint64_t digest(py::handle totals, std::uint64_t seed, std::uint64_t num_bytes) {
    const Bytes sums(totals, PyBUF_SIMPLE);
    require(sums.size() == part_sum::kStripeBytes, "totals", "does not have 64 bytes");
    std::uint64_t values[part_sum::kTotals];
    std::memcpy(values, sums.data(), sizeof values);
    return part_sum::digest(values, seed, num_bytes);
}

}  // namespace

void bind_part_sum(py::module_& module) {
    module.def(
        "add_part", &add_part, "totals"_a, "seed"_a, "offset"_a, "runs"_a,
        "Adds the part of a block that begins at byte `offset`, whose bytes are `runs` one after another, to the "
        "64 bytes of `totals`.");
    module.def("digest", &digest, "totals"_a, "seed"_a, "num_bytes"_a,
               "The checksum of a block whose parts are all in `totals`.");
}

}  // namespace octavo::bind
