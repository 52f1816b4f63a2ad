// Some tokens of a step of a decoder: stages of a group compute one part while the next stage has the one before.
#pragma once

#include <algorithm>
#include <map>
#include <vector>

#include "attention.h"
#include "octavo/llama.h"

namespace octavo {

// Some tokens of a step, which lie one after the other.
struct Llama::Part {
    LlamaStep step;
    std::int64_t first = 0;
    std::vector<std::int32_t> cu_q, seq_lens;
    std::vector<std::int64_t> lora_rows;
    std::map<std::int64_t, AttentionPlan> plans;  // by window

    // The tokens [first, end) of a whole step. A sequence may be divided: its earlier tokens are then in an earlier
    // part.
    void cut(const LlamaStep& whole, std::int64_t begin, std::int64_t end);
};

inline void Llama::Part::cut(const LlamaStep& whole, std::int64_t begin, std::int64_t end) {
    step = whole;
    first = begin;
    for (TensorRef* ids : {&step.token_ids, &step.positions, &step.slots}) {
        ids->data = ids->as<std::int64_t>() + begin;
        ids->shape[0] = end - begin;
    }
    const auto* starts = whole.batch.cu_q.as<std::int32_t>();
    const std::int64_t count = whole.batch.seq_lens.shape[0];
    const std::int64_t one = std::upper_bound(starts, starts + count, begin) - starts - 1;
    const std::int64_t last = std::lower_bound(starts, starts + count, end) - starts - 1;
    cu_q.clear();
    seq_lens.clear();
    for (std::int64_t s = one; s <= last + 1; ++s) {
        cu_q.push_back(static_cast<std::int32_t>(std::clamp<std::int64_t>(starts[s], begin, end) - begin));
    }
    for (std::int64_t s = one; s <= last; ++s) {
        const std::int64_t later = std::max<std::int64_t>(0, starts[s + 1] - end);
        seq_lens.push_back(whole.batch.seq_lens.as<std::int32_t>()[s] - static_cast<std::int32_t>(later));
    }
    BatchRef& batch = step.batch;
    batch.cu_q.data = cu_q.data();
    batch.cu_q.shape[0] = last - one + 2;
    batch.seq_lens.data = seq_lens.data();
    batch.seq_lens.shape[0] = last - one + 1;
    batch.tables.data = batch.tables.as<std::int32_t>() + one * batch.tables.stride[0];
    batch.tables.shape[0] = last - one + 1;
    lora_rows.clear();
    step.loras.clear();
    const auto* rows = whole.lora_rows.as<std::int64_t>();
    for (const auto& [lora, num_rows] : whole.loras) {
        const std::size_t before = lora_rows.size();
        for (std::int64_t i = 0; i < num_rows; ++i) {
            if (rows[i] >= begin && rows[i] < end) {
                lora_rows.push_back(rows[i] - begin);
            }
        }
        if (lora_rows.size() > before) {
            step.loras.push_back({lora, static_cast<std::int64_t>(lora_rows.size() - before)});
        }
        rows += num_rows;
    }
    step.lora_rows.data = lora_rows.data();
    step.lora_rows.shape[0] = static_cast<std::int64_t>(lora_rows.size());
}

}  // namespace octavo
