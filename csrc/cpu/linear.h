// Matrix products within a run of the pool: every lane calls these functions, in the same order.
#pragma once

#include "kernels.h"
#include "octavo/pool.h"

namespace octavo {

constexpr std::int64_t kTurnBytes = 512 << 10;  // the second cache keeps them for all columns

// Rows of one turn of a lane: enough turns for lanes to end together, rows enough to be worth one.
inline std::int64_t rows_at_once(const Weight& weight, int lanes) {
    const std::int64_t share = weight.rows / (static_cast<std::int64_t>(lanes) * 6);
    const std::int64_t most = kTurnBytes / row_bytes(weight), rows = share < most ? share : most;
    return rows < kGroupRows ? kGroupRows : rows / kGroupRows * kGroupRows;
}

inline void run_linear(Lane& lane, int lanes, const LinearJob& job) {
    const std::int64_t rows = job.weight.rows, some = rows_at_once(job.weight, lanes);
    const std::int64_t turns = (rows + some - 1) / some, share = (turns + lanes - 1) / lanes;
    lane.each(share * lanes, [&](std::int64_t i) {
        // Lanes alternate, mostly: so each finds what it asked for ahead in the turn before.
        const std::int64_t turn = i % lanes * share + i / lanes, first = turn * some;
        if (turn < turns) {
            const std::int64_t end = first + some < rows ? first + some : rows;
            kernels().linear(job, first, end, lane.scratch(kernels().linear_scratch(job)));
        }
    });
}

}  // namespace octavo
