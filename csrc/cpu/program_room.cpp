#include "program_room.h"

#include <utility>

#include "kv_pages.h"

namespace octavo {
StatePages::StatePages(const std::vector<TensorRef>& layers) {
    for (const TensorRef& layer : layers) {
        expect(layer, "states", {kAny, kAny}, DType::kU8);
        const std::int64_t blocks = layer.shape[0], bytes = layer.shape[1], apart = layer.stride[0];
        require(layers_.empty() || (bytes == layer_bytes_ && apart == apart_ && blocks == blocks_), "states",
                "are layers of several forms");
        require(blocks > 0 && bytes > 0 && bytes % 4 == 0 && apart >= bytes, "states", "are no floats of blocks");
        layer_bytes_ = bytes;
        apart_ = apart;
        blocks_ = blocks;
        layers_.push_back(layer.as<char>());
    }
}

ProgramRoom::ProgramRoom() : inside_(std::make_unique<Inside>()) {}
ProgramRoom::~ProgramRoom() = default;

void ProgramRoom::use(const std::vector<KvCache>& kv, const std::vector<TensorRef>& states, std::int64_t block_size) {
    require(block_size > 0, "block_size", "is not positive");
    inside_->tokens = -1;
    std::vector<KvPages> layers;
    for (const KvCache& cache : kv) {
        layers.push_back(kv_pages(cache, KvNames("kv")));
        require(layers.back().block_size == block_size, "block_size", "is not that of kv");
    }
    inside_->states = StatePages(states);
    inside_->layers = std::move(layers);
    inside_->block_size = block_size;
}

void ProgramRoom::begin(const BatchRef& batch, const TensorRef& slots, const BatchRef& crossed) {
    Inside& room = *inside_;
    room.tokens = -1;
    expect(slots, "slots", {kAny}, DType::kI64);
    const std::int64_t tokens = slots.shape[0], size = room.block_size;
    require(size > 0, "room", "has no arena");
    std::int64_t blocks = kMostElements;
    for (const KvPages& pages : room.layers) {
        check_slots(slots, "slots", tokens, pages);
        blocks = std::min(blocks, pages.num_blocks);
    }
    if (room.states.num_blocks() > 0) {
        blocks = std::min(blocks, room.states.num_blocks());
    }
    check_batch(batch, tokens, blocks, size);
    if (crossed.seq_lens.given()) {
        check_batch(crossed, tokens, blocks, size, {"crossed_cu_q", "crossed_lens", "crossed_tables", "starts"});
    }
    room.batch = batch;
    room.crossed = crossed;
    room.slots = slots;
    room.plans.clear();
    room.pieces.clear();
    room.runs.clear();
    room.run_of.clear();
    for (std::int64_t i = 0; i < batch.seq_lens.shape[0]; ++i) {
        const std::int64_t begin = batch.cu_q.as<std::int32_t>()[i], end = batch.cu_q.as<std::int32_t>()[i + 1];
        const std::int64_t first = batch.seq_lens.as<std::int32_t>()[i] - (end - begin);  // its position
        const auto* table = batch.tables.as<std::int32_t>() + i * batch.tables.stride[0];
        if (begin == end) {
            continue;
        }
        const std::size_t pieces = room.pieces.size();
        for (std::int64_t t = begin; t < end;) {
            const std::int64_t block = (first + t - begin) / size;
            const std::int64_t next = std::min(end, begin + (block + 1) * size - first);
            room.pieces.push_back({t, next, table[block]});
            t = next;
        }
        room.run_of.insert(room.run_of.end(), static_cast<std::size_t>(end - begin), room.runs.size());
        const std::int64_t before = first > 0 ? table[(first - 1) / size] : -1;
        room.runs.push_back({begin, end, before, pieces, room.pieces.size() - pieces});
    }
    room.tokens = tokens;
}

namespace {

void expect_heads(const KvPages& pages, std::int64_t head_dim, std::int64_t numbers) {
    require(pages.head_dim == head_dim && pages.num_heads * head_dim == numbers, "kv", "has other heads");
}

// Writes what a token has of keys and values into its slot, if it has one.
void write(const Kernels& k, const KvPages& kv, std::int64_t slot, const float* keys, const float* values) {
    const std::int64_t size = kv.block_size;
    for (std::int64_t head = 0; slot >= 0 && head < kv.num_heads; ++head) {
        k.write_slot(kv, kv.keys, slot / size, head, slot % size, keys + head * kv.head_dim);
        k.write_slot(kv, kv.values, slot / size, head, slot % size, values + head * kv.head_dim);
    }
}

}  // namespace

void LayerProgram::Keeping::prepare(ProgramRoom::Inside& room) const {
    expect_heads(room.layers[static_cast<std::size_t>(layer)], head_dim, keys.count);
}

void LayerProgram::Keeping::run(const Frame& f) const {
    const KvPages& pages = f.room.layers[static_cast<std::size_t>(layer)];
    f.thread.each(f.room.tokens, [&](std::int64_t token) {
        write(f.k, pages, f.room.slots.as<std::int64_t>()[token], f.at(keys, token), f.at(values, token));
    });
}

void LayerProgram::Attention::prepare(ProgramRoom::Inside& room) const {
    const KvPages& pages = room.layers[static_cast<std::size_t>(layer)];
    require(!crossed || room.crossed.seq_lens.given(), "room", "has no crossed sequences");
    expect_heads(pages, head_dim, crossed ? pages.num_heads * head_dim : keys.count);
    const AttentionJob job = attention_job(pages, queries.count / head_dim);
    const auto [found, added] = room.plans.try_emplace(plan(pages));
    if (added) {
        found->second.build(crossed ? room.crossed : room.batch, pages.num_heads, job.group, head_dim, options.window,
                            {}, options.both_ways);
    }
}

std::array<std::int64_t, 6> LayerProgram::Attention::plan(const KvPages& pages) const {
    return {pages.num_heads, queries.count, head_dim, options.window, options.both_ways ? 1 : 0, crossed ? 1 : 0};
}

void LayerProgram::Attention::place(const Frame& f, std::int64_t token) const {
    if (rotated > 0) {
        const Rope rope = rope_of({}, f.cos, f.sin, rotated, token, false);
        for (const Slice* slice : {&queries, &keys}) {
            for (std::int64_t i = 0; i < slice->count; i += head_dim) {
                turn(f.k, rope, f.at(*slice, token) + i, f.thread.scratch(rotated));
            }
        }
    }
    write(f.k, f.room.layers[static_cast<std::size_t>(layer)], f.room.slots.as<std::int64_t>()[token],
          f.at(keys, token), f.at(values, token));
}

void LayerProgram::Attention::run(const Frame& f) const {
    const KvPages& pages = f.room.layers[static_cast<std::size_t>(layer)];
    AttentionJob job = attention_job(pages, queries.count / head_dim);
    job.queries = f.at(queries, 0);
    job.query_token = f.apart(queries);
    job.query_head = head_dim;
    job.out = f.at(to, 0);
    job.out_token = f.apart(to);
    job.out_head = head_dim;
    job.scale = options.scale;
    job.soft_cap = options.soft_cap;
    job.window = options.window;
    put_bias(job, options);
    put_sparse(job, {}, queries.count / head_dim);
    f.room.plans.at(plan(pages)).run(f.thread, job);
}

}  // namespace octavo
