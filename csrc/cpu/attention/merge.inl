// Turns sums and weights into results, and merges the parts of an item.

inline float value_factor(const KvPages& pages, std::int64_t head) {
    return static_scale(pages.values, head) * (pages.dtype == DType::kE4M3 ? kE4M3Factor : 1.0F);
}

inline void finish_row(const AttentionJob& job, std::int64_t head, float maximum, float total, const float* sums,
                       float* out) {
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

// Puts the parts of an item together, in order; the first one's memory is used up.
void merge(const AttentionJob& job, const AttentionItem& item, std::int64_t num_parts, std::int64_t part_floats) {
    const std::int64_t rows = item.num_queries * job.group, dim = job.kv.head_dim;
    for (std::int64_t row = 0; row < rows; ++row) {
        float* sums = item.partial + row * (dim + 2);
        for (std::int64_t part = 1; part < num_parts; ++part) {
            const float* more = sums + part * part_floats;
            const float next = more[dim] > sums[dim] ? more[dim] : sums[dim];
            if (next == kNone) {
                continue;
            }
            const float mine = exp2f(sums[dim] - next), theirs = exp2f(more[dim] - next);
            for (std::int64_t d = 0; d < dim; d += 8) {
                const F8 kept = mul8(load8(sums + d), set8(mine));
                store8(sums + d, fma8(load8(more + d), set8(theirs), kept));
            }
            sums[dim] = next;
            sums[dim + 1] = sums[dim + 1] * mine + more[dim + 1] * theirs;
        }
        const std::int64_t head = item.kv_head * job.group + row % job.group;
        finish_row(job, head, sums[dim], sums[dim + 1], sums, out_row(job, item, row));
    }
}
