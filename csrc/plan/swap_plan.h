// Plans how blocks are copied between two arenas: which bytes, in as few pieces as possible, by copy engines or by a
// kernel.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace octavo::plan {

// An arena [layers, blocks, block]: strides and the size of a block, in bytes.
struct ArenaForm {
    std::int64_t num_layers, num_blocks;
    std::int64_t layer, block, length;
};

struct Copy {
    std::int64_t from, to, bytes;  // places in the arenas
};

struct SwapPlan {
    std::vector<std::pair<std::int64_t, std::int64_t>> pairs;  // (from, to), by rising `from`
    std::vector<Copy> copies;                                  // layer after layer
    bool by_kernel;  // copies are so many and small that a kernel that reads and writes both sides is faster
};

constexpr std::int64_t kManyCopies = 16;

// Pairs of neighbours become one copy in each layer where blocks lie without gaps in both arenas. Copies of less than
// `small_run` bytes on average, if there are many, are a kernel's work.
SwapPlan plan_swap(const ArenaForm& from, const ArenaForm& to, std::vector<std::pair<std::int64_t, std::int64_t>> pairs,
                   std::int64_t small_run);

}  // namespace octavo::plan
