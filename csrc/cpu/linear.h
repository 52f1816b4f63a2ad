// Matrix products within a run of the pool: every thread calls these functions, in the same order.
#pragma once

#include "kernels.h"
#include "octavo/pool.h"

namespace octavo {

// How many rows a thread takes at once, which is a turn: whole tiles if each thread gets one, else groups. Some turns
// for each thread, so that one that comes late holds up nobody for long, and of those numbers the one with which
// threads that keep up end together. One thread alone is held up by nobody, and each turn reads all inputs anew.
inline std::int64_t rows_at_once(const Weight& weight, int threads, const Division& by, std::int64_t slabs = 1) {
    const std::int64_t tile = weight.rows / by.rows < threads ? kGroupRows : by.rows;
    const std::int64_t tiles = (weight.rows + tile - 1) / tile;
    const std::int64_t share = threads > 1 ? tiles * slabs / (threads * 6) : tiles, cached = by.most_rows / tile;
    const std::int64_t most = share < cached ? share : cached;
    std::int64_t best = 1, least = tiles + 1;
    for (std::int64_t some = most; some > 0 && 2 * some > most; --some) {
        const std::int64_t turns = (tiles + some - 1) / some, longest = (turns + threads - 1) / threads * some;
        if (longest < least) {
            best = some;
            least = longest;
        }
    }
    return best * tile;
}

// Floats from one column's results of so many rows to the next one's. At a multiple of 2 KiB they would meet in few
// sets of the caches.
inline std::int64_t results_apart(std::int64_t rows) { return rows % 512 == 0 && rows > 0 ? rows + 16 : rows; }

// Room for rounded inputs. A product uses one of them, as its weight's `rounding` says.
struct Inputs {
    InputBlock* digits;
    Bf16Block* bf16;
};

// How many blocks `columns` columns of `cols` inputs take.
inline std::int64_t num_blocks(std::int64_t columns, std::int64_t cols) {
    return input_at((columns + kInputColumns - 1) / kInputColumns * kInputColumns, cols / kBlock);
}

// Rounds `count` inputs of a column, the first of them x[first], as `weight` takes them. Both are multiples of kBlock;
// where a token has one scale, all inputs are rounded at once (inputs_at_once).
inline void round_inputs(const Weight& weight, const float* x, std::int64_t column, std::int64_t first,
                         std::int64_t count, const Inputs& to) {
    const std::int64_t block = input_at(column, weight.cols / kBlock) + first / kBlock * kInputColumns;
    switch (weight.rounding) {
        case Rounding::k15Bits:
        case Rounding::k8Bits:
        case Rounding::kToken15Bits:
        case Rounding::kToken8Bits:
            return kernels().to_digits(x + first, count, weight.rounding, to.digits + block);
        case Rounding::kBf16:
            return kernels().to_bf16_blocks(x + first, count, to.bf16 + block);
        case Rounding::kNone:
            return;
    }
}

// How many of a token's `count` inputs one thread makes and rounds at once, if `some` of them would be best.
inline std::int64_t inputs_at_once(const Weight& weight, std::int64_t count, std::int64_t some) {
    return is_of_tokens(weight.rounding) ? count : some;
}

inline void run_linear(PoolThread& thread, int threads, const LinearJob& job) {
    if (job.columns == 0) {
        return;
    }
    const Division by = kernels().division(job.weight, job.columns);
    const std::int64_t slabs = (job.columns + by.columns - 1) / by.columns;
    const std::int64_t rows = job.weight.rows, some = rows_at_once(job.weight, threads, by, slabs);
    const std::int64_t turns = (rows + some - 1) / some, share = (turns + threads - 1) / threads;
    thread.each(slabs * share * threads, [&](std::int64_t i) {
        // Lanes mostly alternate, so a thread's turns mostly follow each other in memory: it has asked for the
        // beginning of each in the turn before.
        const std::int64_t turn = i % threads * share + i / threads % share, first = turn * some;
        if (turn < turns) {
            const std::int64_t column = i / (share * threads) * by.columns, left = job.columns - column;
            const LinearJob slab = some_columns(job, column, left < by.columns ? left : by.columns);
            const std::int64_t end = first + some < rows ? first + some : rows;
            kernels().linear(slab, first, end, thread.scratch(kernels().linear_scratch(slab)));
        }
    });
}

}  // namespace octavo
