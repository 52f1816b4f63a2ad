// Products as parts of a run: every lane calls these, in the same order.
#pragma once

#include "kernels.h"
#include "octavo/pool.h"

namespace octavo {

// Rows of one turn of a lane: enough turns for lanes to end together, rows enough to be worth one.
inline std::int64_t rows_at_once(const Weight& weight, int lanes) {
    const std::int64_t share = weight.rows / (static_cast<std::int64_t>(lanes) * 6);
    const std::int64_t rows = share < 16 ? 16 : share > 256 ? 256 : share;
    return (rows + kGroupRows - 1) / kGroupRows * kGroupRows;
}

inline void run_linear(Lane& lane, int lanes, const LinearJob& job) {
    const std::int64_t rows = job.weight.rows, some = rows_at_once(job.weight, lanes);
    lane.each((rows + some - 1) / some, [&](std::int64_t turn) {
        const std::int64_t first = turn * some, end = first + some < rows ? first + some : rows;
        kernels().linear(job, first, end, lane.scratch(kernels().linear_scratch(job)));
    });
}

}  // namespace octavo
