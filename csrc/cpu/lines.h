// Sizes in memory that processes share: what one writes begins at a line of the cache.
#pragma once

#include <cstdint>

namespace octavo {

inline std::int64_t lines(std::int64_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace octavo
