// Turns sums and weights into results, and merges the parts of an item.

inline float value_factor(const KvPages& pages, std::int64_t head) {
    return static_scale(pages.values, head) * (pages.dtype == DType::kE4M3 ? kE4M3Factor : 1.0F);
}

// Not inlined: it must not depend on the caller which products a compiler fuses with sums.
__attribute__((noinline)) void finish_row(const AttentionJob& job, std::int64_t head, float maximum, float total,
                                          const float* sums, float* out) {
    if (job.sinks) {
        total += exp2f(job.sinks[head] * kLog2E - maximum);
    }
    const float factor = total == 0.0F ? 0.0F : value_factor(job.kv, head / job.group) / total;
    for (std::int64_t d = 0; d < job.kv.head_dim; d += 8) {
        store8(out + d, mul8(load8(sums + d), set8(factor)));
    }
}

inline float* out_row(const AttentionJob& job, const AttentionItem& item, std::int64_t row) {
    const std::int64_t head = item.kv_head * job.group + row % job.group;
    return job.out + (item.first_token + row / job.group) * job.out_token + head * job.out_head;
}

// Adds what a row sums up over a split of keys to what it sums up over those before, [dim + 2]: sums, maximum, weight.
// A split of which it sees no key changes no bit. Not inlined, as above.
__attribute__((noinline)) void merge_row(float* before, const float* sums, float maximum, float total,
                                         std::int64_t dim) {
    if (total == 0.0F) {
        return;
    }
    if (before[dim + 1] == 0.0F) {
        std::memcpy(before, sums, static_cast<std::size_t>(dim) * 4);
        before[dim] = maximum;
        before[dim + 1] = total;
        return;
    }
    const float next = maximum > before[dim] ? maximum : before[dim];
    if (next == kNone) {
        return;
    }
    const float mine = before[dim] == next ? 1.0F : exp2f(before[dim] - next);
    const float theirs = maximum == next ? 1.0F : exp2f(maximum - next);
    for (std::int64_t d = 0; d < dim; d += 8) {
        const F8 kept = mul8(load8(before + d), set8(mine));
        store8(before + d, fma8(load8(sums + d), set8(theirs), kept));
    }
    before[dim] = next;
    before[dim + 1] = before[dim + 1] * mine + total * theirs;
}

// Puts the parts of an item together, in order; the first one's memory is used up.
void merge(const AttentionJob& job, const AttentionItem& item, std::int64_t num_parts, std::int64_t part_floats) {
    const std::int64_t rows = item.num_queries * job.group, dim = job.kv.head_dim;
    for (std::int64_t row = 0; row < rows; ++row) {
        float* sums = item.partial + row * (dim + 2);
        for (std::int64_t part = 1; part < num_parts; ++part) {
            const float* more = sums + part * part_floats;
            merge_row(sums, more, more[dim], more[dim + 1], dim);
        }
        const std::int64_t head = item.kv_head * job.group + row % job.group;
        finish_row(job, head, sums[dim], sums[dim + 1], sums, out_row(job, item, row));
    }
}
