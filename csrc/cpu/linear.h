// Matrix products within a run of the pool: every thread calls these functions, in the same order.
#pragma once

#include "kernels.h"
#include "octavo/pool.h"

namespace octavo {

constexpr std::int64_t kTurnBytes = 512 << 10;  // the second cache keeps them for all columns

// How many rows a thread takes at once, which is a turn: whole tiles if each thread gets one, else groups. Some turns
// for each thread, so that one that comes late holds up nobody for long, and of those numbers the one with which
// threads that keep up end together. One thread alone is held up by nobody, and each turn reads all inputs anew.
inline std::int64_t rows_at_once(const Weight& weight, int threads) {
    const std::int64_t wanted = kernels().tile_rows(weight), enough = weight.rows / wanted;
    const std::int64_t tile = enough < threads ? kGroupRows : wanted, tiles = (weight.rows + tile - 1) / tile;
    const std::int64_t share = threads > 1 ? tiles / (threads * 6) : tiles,
                       cached = kTurnBytes / row_bytes(weight) / tile;
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

// Room for rounded inputs. A product uses one of them, as its weight's `rounding` says.
struct Inputs {
    InputBlock* digits;
    Bf16Block* bf16;
};

// How many blocks `columns` columns of `cols` inputs take.
inline std::int64_t num_blocks(std::int64_t columns, std::int64_t cols) {
    return input_at((columns + kInputColumns - 1) / kInputColumns * kInputColumns, cols / kBlock);
}

// Rounds `count` inputs of a column, the first of them x[first], as `weight` takes them. Both are multiples of kBlock.
inline void round_inputs(const Weight& weight, const float* x, std::int64_t column, std::int64_t first,
                         std::int64_t count, const Inputs& to) {
    const std::int64_t block = input_at(column, weight.cols / kBlock) + first / kBlock * kInputColumns;
    switch (weight.rounding) {
        case Rounding::k15Bits:
        case Rounding::k8Bits:
            return kernels().to_digits(x + first, count, weight.rounding, to.digits + block);
        case Rounding::kBf16:
            return kernels().to_bf16_blocks(x + first, count, to.bf16 + block);
        case Rounding::kNone:
            return;
    }
}

inline void run_linear(PoolThread& thread, int threads, const LinearJob& job) {
    const std::int64_t rows = job.weight.rows, some = rows_at_once(job.weight, threads);
    const std::int64_t turns = (rows + some - 1) / some, share = (turns + threads - 1) / threads;
    thread.each(share * threads, [&](std::int64_t i) {
        // Lanes mostly alternate, so a thread's turns mostly follow each other in memory: it has asked for the
        // beginning of each in the turn before.
        const std::int64_t turn = i % threads * share + i / threads, first = turn * some;
        if (turn < turns) {
            const std::int64_t end = first + some < rows ? first + some : rows;
            kernels().linear(job, first, end, thread.scratch(kernels().linear_scratch(job)));
        }
    });
}

}  // namespace octavo
