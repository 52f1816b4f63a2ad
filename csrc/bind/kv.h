#pragma once

#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

#include "octavo/api.h"
#include "octavo/host_links.h"

namespace octavo::bind {

// The layers of an arena, looked at once.
struct Kv {
    pybind11::tuple owners;  // of the memory: a list could lose them
    std::vector<KvCache> layers;
};

// Spans as Python has them: (first, count).
using Pairs = std::vector<std::pair<std::int64_t, std::int64_t>>;

inline std::vector<Span> spans_of(const Pairs& pairs) {
    std::vector<Span> spans;
    for (const auto& [first, count] : pairs) {
        spans.push_back({first, count});
    }
    return spans;
}

}  // namespace octavo::bind
