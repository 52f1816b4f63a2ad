#include "lora.h"

#include <algorithm>
#include <vector>

#include "kernels.h"

namespace octavo {
namespace {

constexpr std::int64_t kShares = 2;  // of the work for each thread, at least, so that one that is late holds up nobody
constexpr std::int64_t kTogether[] = {8, 64};  // rows of a, and columns of y, that are computed together

// Rows [first, first + count) of a matrix.
Weight rows_of(const Weight& weight, std::int64_t first, std::int64_t count) {
    Weight some = weight;
    some.data = static_cast<const char*>(weight.data) + first * weight.stride * plain_bytes(weight.format);
    some.rows = count;
    return some;
}

// The rows of share `share` of `shares`, of `rows`.
struct Share {
    std::int64_t first, end;

    Share(std::int64_t rows, std::int64_t together, std::int64_t share, std::int64_t shares) {
        const std::int64_t groups = (rows + together - 1) / together, each = (groups + shares - 1) / shares;
        first = std::min(rows, share * each * together);
        end = std::min(rows, first + each * together);
    }
};

// Calls run(first, count) for each run of tokens that follow each other, with its place among the group's rows.
template <typename Run>
void each_run(const std::int64_t* rows, std::int64_t count, const Run& run) {
    for (std::int64_t first = 0; first < count;) {
        std::int64_t end = first + 1;
        while (end < count && rows[end] == rows[end - 1] + 1) {
            ++end;
        }
        run(first, end - first);
        first = end;
    }
}

// `next`: what the thread probably reads then.
void shrink(PoolThread& thread, const LoraJob& job, const LoraStack& stack, float scale, const std::int64_t* rows,
            std::int64_t count, float* low, const Share& share, const void* next) {
    const Weight a = rows_of(stack.a, share.first, share.end - share.first);
    each_run(rows, count, [&](std::int64_t first, std::int64_t columns) {
        float* to = low + first * job.low_rows + share.first;
        LinearJob product{
            a, job.x + rows[first] * job.cols, job.cols, nullptr, nullptr, columns, to, job.low_rows, nullptr, false};
        product.next = next;
        kernels().linear(product, 0, a.rows, thread.scratch(kernels().linear_scratch(product)));
        for (std::int64_t c = 0; c < columns; ++c) {
            for (std::int64_t k = 0; k < a.rows; ++k) {
                to[c * job.low_rows + k] *= scale;
            }
        }
    });
}

void expand(const LoraJob& job, const LoraStack& stack, const std::int64_t* rows, std::int64_t count, const float* low,
            const Share& share) {
    for (const LoraPart& part : stack.parts) {
        const std::int64_t first = std::max(share.first - part.first, std::int64_t{0});
        const std::int64_t end = std::min(share.end - part.first, part.b.cols);
        for (std::int64_t i = 0; first < end && i < count; ++i) {
            float* y = job.y + rows[i] * job.rows + part.first + first;
            kernels().add_low_rank(part, first, end - first, low + i * job.low_rows + part.low, y);
        }
    }
}

// Calls run(a group, its first row among all, the share, of how many) for shares of all groups' work.
template <typename Run>
void each_share(PoolThread& thread, int threads, const LlamaStep& step, const Run& run) {
    const auto groups = static_cast<std::int64_t>(step.loras.size());
    const std::int64_t shares = groups > 0 ? (kShares * threads + groups - 1) / groups : 0;
    thread.each(groups * shares, [&](std::int64_t i) {
        const auto index = static_cast<std::size_t>(i / shares);
        std::int64_t first = 0;  // nothing is kept: in a run of the pool nothing may throw
        for (std::size_t group = 0; group < index; ++group) {
            first += step.loras[group].count;
        }
        run(index, first, i % shares, shares);
    });
}

}  // namespace

std::int64_t lora_low_rows(const LlamaStep& step) {
    std::int64_t most = 0;
    for (const LoraGroup& group : step.loras) {
        for (const LoraLayer& layer : group.lora->layers) {
            for (const LoraStack* stack : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) {
                most = std::max(most, stack->parts.empty() ? 0 : stack->a.rows);
            }
        }
    }
    return most;
}

void check_lora_rows(const LlamaStep& step, std::int64_t num_tokens) {
    std::int64_t total = 0;
    for (const LoraGroup& group : step.loras) {
        require(group.count > 0, "loras", "has a group without rows");
        total += group.count;
    }
    if (total == 0) {
        return;
    }
    expect(step.lora_rows, "lora_rows", {total}, DType::kI64);
    std::vector<bool> seen(static_cast<std::size_t>(num_tokens));
    for (std::int64_t i = 0; i < total; ++i) {
        const std::int64_t row = step.lora_rows.as<std::int64_t>()[i];
        require(row >= 0 && row < num_tokens, "lora_rows", "is out of range");
        require(!seen[static_cast<std::size_t>(row)], "lora_rows", "names a token twice");
        seen[static_cast<std::size_t>(row)] = true;
    }
}

void check_lora_stack(const LoraStack& stack, const char* name, std::int64_t rows, std::int64_t cols) {
    std::int64_t ranks = 0, end = 0;
    for (const LoraPart& part : stack.parts) {
        require(part.b.data != nullptr && !part.b.packed(), name, "has a part that is not plain");
        require(part.b.stride % kGroupRows == 0, name, "has a part whose rows are no whole tiles of 16");
        require(part.first >= end && part.b.cols <= rows - part.first && part.low == ranks, name,
                "has parts in other places");
        end = part.first + part.b.cols;
        ranks += part.b.rows;
    }
    if (!stack.parts.empty()) {
        require(stack.a.data != nullptr && !stack.a.packed(), name, "has a matrix that is not plain");
        require(stack.a.rows == ranks && stack.a.cols == cols, name, "has another shape");
    }
}

void shrink_lora(PoolThread& thread, int threads, const LlamaStep& step, const LoraJob& job) {
    const auto stack_of = [&](std::size_t group) -> const LoraStack& {
        return step.loras[group].lora->layers[job.layer].*job.stack;
    };
    each_share(thread, threads, step, [&](std::size_t group, std::int64_t first, std::int64_t i, std::int64_t shares) {
        const auto& [lora, count] = step.loras[group];
        const LoraStack& stack = stack_of(group);
        const std::int64_t* rows = step.lora_rows.as<std::int64_t>() + first;
        float* low = job.low + first * job.low_rows;
        for (std::int64_t row = 0; i == 0 && row < count; ++row) {
            const auto parts = static_cast<std::int64_t>(stack.parts.size());
            job.low_rank[rows[row]] = {stack.parts.data(), parts, low + row * job.low_rows};
        }
        const Share share(stack.a.rows, kTogether[0], i, shares);
        if (!stack.parts.empty() && share.first < share.end) {
            const std::size_t next = group + static_cast<std::size_t>(threads);
            shrink(thread, job, stack, lora->scale, rows, count, low, share,
                   shares == 1 && next < step.loras.size() ? stack_of(next).a.data : nullptr);
        }
    });
}

void add_lora(PoolThread& thread, int threads, const LlamaStep& step, const LoraJob& job, std::int64_t start,
              std::int64_t end) {
    each_share(thread, threads, step, [&](std::size_t group, std::int64_t first, std::int64_t i, std::int64_t shares) {
        const auto& [lora, count] = step.loras[group];
        Share share(end - start, kTogether[1], i, shares);
        share.first += start;
        share.end += start;
        expand(job, lora->layers[job.layer].*job.stack, step.lora_rows.as<std::int64_t>() + first, count,
               job.low + first * job.low_rows, share);
    });
}

void Llama::check_lora(const Lora& lora) const {
    const std::int64_t queries = sizes_.heads * sizes_.head_dim, keys = sizes_.kv_heads * sizes_.head_dim;
    require(sizes_.latent.rank == 0, "lora", "is for a model whose heads have keys of their own");
    require(lora.layers.size() == layers_.size(), "lora", "has another number of layers");
    for (const LoraLayer& layer : lora.layers) {
        check_lora_stack(layer.qkv, "qkv", queries + 2 * keys, sizes_.hidden);
        check_lora_stack(layer.out, "out", sizes_.hidden, queries);
        check_lora_stack(layer.gate_up, "gate_up", 2 * sizes_.inner, sizes_.hidden);
        check_lora_stack(layer.down, "down", sizes_.hidden, sizes_.inner);
    }
}

}  // namespace octavo
