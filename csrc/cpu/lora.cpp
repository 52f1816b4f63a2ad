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

void shrink(PoolThread& thread, const LoraJob& job, const LoraStack& stack, float scale, const std::int64_t* rows,
            std::int64_t count, float* low, const Share& share) {
    const Weight a = rows_of(stack.a, share.first, share.end - share.first);
    each_run(rows, count, [&](std::int64_t first, std::int64_t columns) {
        float* to = low + first * job.low_rows + share.first;
        const LinearJob product{
            a, job.x + rows[first] * job.cols, job.cols, nullptr, nullptr, columns, to, job.low_rows, nullptr, false};
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
            kernels().add_low_rank(part.b, first, end - first, low + i * job.low_rows + part.low, y);
        }
    }
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

void add_lora(PoolThread& thread, int threads, const LlamaStep& step, const LoraJob& job) {
    const auto groups = static_cast<std::int64_t>(step.loras.size());
    if (groups == 0) {
        return;
    }
    const std::int64_t shares = (kShares * threads + groups - 1) / groups;
    const auto first_row = [&](std::size_t group) {  // nothing is kept: in a run of the pool nothing may throw
        std::int64_t first = 0;
        for (std::size_t i = 0; i < group; ++i) {
            first += step.loras[i].count;
        }
        return first;
    };
    const auto each_share = [&](bool to_low) {
        thread.each(groups * shares, [&](std::int64_t i) {
            const auto index = static_cast<std::size_t>(i / shares);
            const auto& [lora, count] = step.loras[index];
            const LoraStack& stack = lora->layers[job.layer].*job.stack;
            const std::int64_t all = to_low ? stack.a.rows : job.rows;
            const Share share(all, kTogether[to_low ? 0 : 1], i % shares, shares);
            if (stack.parts.empty() || share.first == share.end) {
                return;
            }
            const std::int64_t first = first_row(index);
            const std::int64_t* rows = step.lora_rows.as<std::int64_t>() + first;
            float* low = job.low + first * job.low_rows;
            if (to_low) {
                shrink(thread, job, stack, lora->scale, rows, count, low, share);
            } else {
                expand(job, stack, rows, count, low, share);
            }
        });
    };
    each_share(true);
    each_share(false);
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
