#include "program_room.h"

#include "kv_pages.h"

namespace octavo {
namespace {

constexpr std::int64_t kChannels = 512;  // of a convolution, for one thread at a time
constexpr std::int64_t kScanned = 256;   // channels of Mamba 1

}  // namespace

void StatePages::use(const std::vector<TensorRef>& layers) {
    layers_.clear();
    for (const TensorRef& layer : layers) {
        usable(layer, "states");
        require(layer.ndim > 1 && layer.shape[0] > 0, "states", "are no layers of an arena");
        const std::int64_t bytes = layer.size() / layer.shape[0] * size_of(layer.dtype);
        const std::int64_t apart = layer.stride[0] * size_of(layer.dtype);
        require(layers_.empty() || (bytes == layer_bytes_ && apart == apart_ && layer.shape[0] == blocks_), "states",
                "are layers of several forms");
        require(bytes % 64 == 0 && bytes > 0 && apart >= bytes, "states", "are not made of 64 bytes each");
        layer_bytes_ = bytes;
        apart_ = apart;
        blocks_ = layer.shape[0];
        layers_.push_back(layer.as<char>());
    }
}

ProgramRoom::ProgramRoom() : inside_(std::make_unique<Inside>()) {}
ProgramRoom::~ProgramRoom() = default;

void ProgramRoom::use(const std::vector<KvCache>& kv, const std::vector<TensorRef>& states, std::int64_t block_size) {
    require(block_size > 0, "block_size", "is not positive");
    inside_->tokens = -1;
    inside_->block_size = block_size;
    inside_->layers.clear();
    for (const KvCache& cache : kv) {
        inside_->layers.push_back(kv_pages(cache, KvNames("kv")));
        require(inside_->layers.back().block_size == block_size, "block_size", "is not that of kv");
    }
    inside_->states.use(states);
}

void ProgramRoom::begin(const BatchRef& batch, const TensorRef& slots) {
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
    room.batch = batch;
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

void LayerProgram::Convolution::run(const Frame& f) const {
    const std::int64_t shares = (from.count + kChannels - 1) / kChannels;
    const auto some = [&](std::int64_t i) { return std::min(kChannels, from.count - i % shares * kChannels); };
    f.thread.each(f.room.tokens * shares,
                  [&](std::int64_t i) { make(f, i / shares, i % shares * kChannels, some(i)); });
    f.thread.each(static_cast<std::int64_t>(f.room.runs.size()) * shares, [&](std::int64_t i) {
        keep(f, f.room.runs[static_cast<std::size_t>(i / shares)], i % shares * kChannels, some(i));
    });
}

void LayerProgram::Convolution::make(const Frame& f, std::int64_t token, std::int64_t channel,
                                     std::int64_t count) const {
    const ProgramRun& run = f.room.runs[f.room.run_of[static_cast<std::size_t>(token)]];
    const std::int64_t width = taps.shape[0], bytes = count * 4;
    float* space = f.thread.scratch(width * kChannels);
    const float* seen[kMostTaps];
    for (std::int64_t j = 0; j < width; ++j) {
        const std::int64_t place = token - (width - 1) + j, row = place - run.begin + width - 1;
        const std::int64_t kept = first + (row * from.count + channel) * 4;
        if (place >= run.begin) {
            seen[j] = f.at(from, place) + channel;
            continue;
        }
        const char* known = run.before < 0 ? nullptr : f.room.states.at(run.before, kept, bytes);
        if (known != nullptr) {
            seen[j] = reinterpret_cast<const float*>(known);
            continue;
        }
        float* own = space + j * kChannels;
        std::fill_n(own, count, 0.0F);
        if (run.before >= 0) {
            f.room.states.read(run.before, kept, bytes, own);
        }
        seen[j] = own;
    }
    f.k.convolve(seen, taps.as<float>() + channel, taps.stride[0], width,
                 bias.given() ? bias.as<float>() + channel : nullptr, silu, count, f.at(to, token) + channel);
}

// The last piece comes first: a sequence's first block may be that of the state before it, which the others still read.
// There, too, a row is read before it is written.
void LayerProgram::Convolution::keep(const Frame& f, const ProgramRun& run, std::int64_t channel,
                                     std::int64_t count) const {
    const std::int64_t kept = taps.shape[0] - 1, bytes = count * 4;
    float* space = f.thread.scratch(kChannels);
    for (std::size_t p = run.num_pieces; p-- > 0;) {
        const ProgramPiece& piece = f.room.pieces[run.first_piece + p];
        for (std::int64_t row = 0; row < kept; ++row) {
            const std::int64_t place = piece.end - kept + row;
            const float* source = space;
            if (place >= run.begin) {
                source = f.at(from, place) + channel;
            } else if (run.before < 0) {
                std::fill_n(space, count, 0.0F);
            } else {
                const std::int64_t old = place - run.begin + kept;
                f.room.states.read(run.before, first + (old * from.count + channel) * 4, bytes, space);
            }
            f.room.states.write(piece.block, first + (row * from.count + channel) * 4, bytes, source);
        }
    }
}

void LayerProgram::Recurrence::run(const Frame& f) const {
    f.thread.each(static_cast<std::int64_t>(f.room.runs.size()) * sizes.heads, [&](std::int64_t i) {
        go_through(f, f.room.runs[static_cast<std::size_t>(i / sizes.heads)], i % sizes.heads);
    });
}

void LayerProgram::Recurrence::go_through(const Frame& f, const ProgramRun& run, std::int64_t head) const {
    const std::int64_t numbers = sizes.key_dim * sizes.value_dim, bytes = numbers * 4, wide = head * sizes.value_dim;
    const std::int64_t narrow = head / (sizes.heads / sizes.key_heads) * sizes.key_dim;
    float* space = f.thread.scratch(numbers + 8 * sizes.key_dim + sizes.value_dim);
    std::int64_t before = run.before;
    for (std::size_t p = 0; p < run.num_pieces; ++p) {
        const auto [begin, end, block] = f.room.pieces[run.first_piece + p];
        RecurrenceJob job{};
        job.out = f.at(to, begin) + wide;
        job.queries = f.at(queries, begin) + narrow;
        job.keys = f.at(keys, begin) + narrow;
        job.values = f.at(values, begin) + wide;
        job.decays = f.at(decays, begin) + head;
        job.rates = delta ? f.at(rates, begin) + head : nullptr;
        job.tokens = end - begin;
        job.heads = job.key_heads = job.group = 1;
        job.key_dim = sizes.key_dim;
        job.value_dim = sizes.value_dim;
        job.queries_apart = f.apart(queries);
        job.keys_apart = f.apart(keys);
        job.values_apart = f.apart(values);
        job.decays_apart = f.apart(decays);
        job.rates_apart = delta ? f.apart(rates) : 0;
        job.out_apart = f.apart(to);
        f.room.states.change(before, block, first + head * bytes, bytes, space, [&](float* state) {
            job.state = state;
            f.k.recur(job, 0, 0, sizes.value_dim, space + numbers);
        });
        before = block;
    }
    if (skips.given()) {
        for (std::int64_t t = run.begin; t < run.end; ++t) {
            float* out = f.at(to, t) + head * sizes.value_dim;
            const float *x = f.at(inputs, t) + head * sizes.value_dim, skip = skips.as<float>()[head];
            for (std::int64_t i = 0; i < sizes.value_dim; ++i) {
                out[i] += skip * x[i];
            }
        }
    }
}

void LayerProgram::Scan::run(const Frame& f) const {
    const std::int64_t shares = (values.count + kScanned - 1) / kScanned;
    f.thread.each(static_cast<std::int64_t>(f.room.runs.size()) * shares, [&](std::int64_t i) {
        const std::int64_t channel = i % shares * kScanned;
        go_through(f, f.room.runs[static_cast<std::size_t>(i / shares)], channel,
                   std::min(kScanned, values.count - channel));
    });
}

void LayerProgram::Scan::go_through(const Frame& f, const ProgramRun& run, std::int64_t channel,
                                    std::int64_t count) const {
    const std::int64_t dim = queries.count, bytes = count * dim * 4, place = first + channel * dim * 4;
    float* space = f.thread.scratch(kScanned * dim);
    std::int64_t before = run.before;
    for (std::size_t p = 0; p < run.num_pieces; ++p) {
        const auto [begin, end, block] = f.room.pieces[run.first_piece + p];
        f.room.states.change(before, block, place, bytes, space, [&, from = begin, num = end - begin](float* state) {
            f.k.scan({f.at(to, from) + channel, state, f.at(queries, from), f.at(keys, from),
                      f.at(values, from) + channel, f.at(steps, from) + channel,
                      rates.as<float>() + channel * rates.stride[0], skips.as<float>() + channel, num, count, dim,
                      f.apart(to), f.apart(queries), f.apart(keys), f.apart(values), f.apart(steps)});
        });
        before = block;
    }
}

void LayerProgram::Attention::prepare(ProgramRoom::Inside& room) const {
    const KvPages& pages = room.layers[static_cast<std::size_t>(layer)];
    require(pages.head_dim == head_dim && pages.num_heads * head_dim == keys.count, "kv", "has other heads");
    const AttentionJob job = attention_job(pages, queries.count / head_dim);
    const auto [found, added] = room.plans.try_emplace(plan(pages));
    if (added) {
        found->second.build(room.batch, pages.num_heads, job.group, head_dim, options.window);
    }
}

// By what layers that share a plan are alike.
std::array<std::int64_t, 4> LayerProgram::Attention::plan(const KvPages& pages) const {
    return {pages.num_heads, queries.count, head_dim, options.window};
}

// Turns what belongs to a token, and puts its keys and values into their slot.
void LayerProgram::Attention::place(const Frame& f, std::int64_t token) const {
    const KvPages& kv = f.room.layers[static_cast<std::size_t>(layer)];
    if (rotated > 0) {
        const Rope rope = rope_of({}, f.cos, f.sin, rotated, token, false);
        for (const Slice* slice : {&queries, &keys}) {
            for (std::int64_t i = 0; i < slice->count; i += head_dim) {
                turn(f.k, rope, f.at(*slice, token) + i, f.thread.scratch(rotated));
            }
        }
    }
    const std::int64_t slot = f.room.slots.as<std::int64_t>()[token], size = kv.block_size;
    for (std::int64_t head = 0; slot >= 0 && head < kv.num_heads; ++head) {
        f.k.write_slot(kv, kv.keys, slot / size, head, slot % size, f.at(keys, token) + head * head_dim);
        f.k.write_slot(kv, kv.values, slot / size, head, slot % size, f.at(values, token) + head * head_dim);
    }
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
    put_sparse(job, {}, queries.count / head_dim);
    f.room.plans.at(plan(pages)).run(f.thread, job);
}

}  // namespace octavo
