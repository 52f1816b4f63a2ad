// Operations of programs that look back: convolutions and recurrences, whose states lie in blocks.
#include <cmath>
#include <utility>

#include "program_room.h"

namespace octavo {
namespace {

constexpr std::int64_t kChannels = 512;  // of a convolution, for one thread at a time
constexpr std::int64_t kScanned = 256;   // channels of Mamba 1

}  // namespace

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

void LayerProgram::keep_state(std::int64_t place, std::int64_t bytes) {
    require(place >= 0 && place < kMostElements && place % 4 == 0, "place", "is out of range");
    state_bytes_ = std::max(state_bytes_, place + bytes);
    last_rounded_ = {};
}

void LayerProgram::convolve(const Slice& to, const Slice& from, const TensorRef& taps, const TensorRef& bias, bool silu,
                            std::int64_t place) {
    apart(to, "to", {from}, "from");
    as_wide(to, from.count, "to");
    expect(taps, "taps", {kAny, from.count}, DType::kF32);
    require(taps.shape[0] > 1 && taps.shape[0] <= kMostTaps, "taps", "are not 2 to 16");
    if (bias.given()) {
        floats(bias, from.count, "bias");
    }
    keep_state(place, (taps.shape[0] - 1) * from.count * 4);
    auto made = std::make_unique<Convolution>();
    made->to = to;
    made->from = from;
    made->taps = taps;
    made->bias = bias;
    made->silu = silu;
    made->first = place;
    operations_.push_back(std::move(made));
}

std::unique_ptr<LayerProgram::Recurrence> LayerProgram::recurrence(const Slice& to, const Slice& queries,
                                                                   const Slice& keys, const Slice& values,
                                                                   const Slice& fades, const RecurringSizes& sizes,
                                                                   std::int64_t place) {
    for (const std::int64_t size : {sizes.heads, sizes.key_heads, sizes.key_dim, sizes.value_dim}) {
        require(size > 0 && size <= width_, "sizes", "are out of range");
    }
    require(sizes.heads % sizes.key_heads == 0, "sizes", "have heads that keys do not divide");
    apart(to, "to", {queries, keys, values, fades}, "values");
    as_wide(queries, volume({sizes.key_heads, sizes.key_dim}), "queries");
    as_wide(keys, queries.count, "keys");
    as_wide(values, volume({sizes.heads, sizes.value_dim}), "values");
    as_wide(to, values.count, "to");
    as_wide(fades, sizes.heads, "fades");
    keep_state(place, volume({sizes.heads, sizes.key_dim, sizes.value_dim}) * 4);
    auto made = std::make_unique<Recurrence>(to, queries, keys, values);
    made->decays = fades;
    made->sizes = sizes;
    made->first = place;
    return made;
}

void LayerProgram::delta(const Slice& to, const Slice& queries, const Slice& keys, const Slice& values,
                         const Slice& fades, const Slice& betas, const TensorRef& rates, const TensorRef& bias,
                         float eps, const RecurringSizes& sizes, std::int64_t place) {
    auto made = recurrence(to, queries, keys, values, fades, sizes, place);
    apart(to, "to", {betas}, "betas");
    as_wide(betas, sizes.heads, "betas");
    const float *rate = floats(rates, sizes.heads, "rates"), *added = floats(bias, sizes.heads, "bias");
    made->rates = betas;
    made->delta = true;
    const std::int64_t dim = sizes.key_dim;
    const auto root = 1.0F / std::sqrt(static_cast<float>(dim));
    const std::vector<float> ones(static_cast<std::size_t>(sizes.heads), 1.0F);
    const std::vector<float> short_keys(static_cast<std::size_t>(dim), root);  // a norm of length 1
    const std::vector<float> short_queries(static_cast<std::size_t>(dim), root * root);
    add_row([=](const Frame& f, std::int64_t t) {
        float *query = f.at(queries, t), *key = f.at(keys, t), *fading = f.at(fades, t), *beta = f.at(betas, t);
        for (std::int64_t i = 0; i < queries.count; i += dim) {
            f.k.rms_norm(query + i, short_queries.data(), eps / static_cast<float>(dim), dim, query + i);
            f.k.rms_norm(key + i, short_keys.data(), eps / static_cast<float>(dim), dim, key + i);
        }
        f.k.fade(fading, added, rate, 0.0F, INFINITY, fades.count, f.thread.scratch(fades.count), fading);
        f.k.sigmoid_mul(beta, ones.data(), betas.count, beta);
    });
    operations_.push_back(std::move(made));
}

void LayerProgram::mamba2(const Slice& to, const Slice& queries, const Slice& keys, const Slice& values,
                          const Slice& fades, const Slice& space, const TensorRef& rates, const TensorRef& bias,
                          const TensorRef& skips, float low, float high, const RecurringSizes& sizes,
                          std::int64_t place) {
    auto made = recurrence(to, queries, keys, values, fades, sizes, place);
    apart(space, "space", {to, queries, keys, values, fades}, "values");
    as_wide(space, values.count, "space");
    const float *rate = floats(rates, sizes.heads, "rates"), *added = floats(bias, sizes.heads, "bias");
    floats(skips, sizes.heads, "skips");
    made->inputs = values;
    made->values = space;
    made->skips = skips;
    made->delta = false;
    add_row([=](const Frame& f, std::int64_t t) {
        float *fading = f.at(fades, t), *steps = f.thread.scratch(fades.count), *scaled = f.at(space, t);
        const float* x = f.at(values, t);
        f.k.fade(fading, added, rate, low, high, fades.count, steps, fading);
        for (std::int64_t i = 0; i < values.count; ++i) {
            scaled[i] = x[i] * steps[i / sizes.value_dim];
        }
    });
    operations_.push_back(std::move(made));
}

void LayerProgram::mamba1(const Slice& to, const Slice& queries, const Slice& keys, const Slice& values,
                          const Slice& fades, const TensorRef& rates, const TensorRef& bias, const TensorRef& skips,
                          std::int64_t place) {
    apart(to, "to", {queries, keys, values, fades}, "values");
    as_wide(to, values.count, "to");
    as_wide(fades, values.count, "fades");
    as_wide(keys, queries.count, "keys");
    expect(rates, "rates", {values.count, queries.count}, DType::kF32);
    expect_dense(rates, "rates");
    const float* added = floats(bias, values.count, "bias");
    floats(skips, values.count, "skips");
    keep_state(place, volume({values.count, queries.count}) * 4);
    auto made = std::make_unique<Scan>(to, queries, keys, values);
    made->steps = fades;
    made->rates = rates;
    made->skips = skips;
    made->first = place;
    add_row([=](const Frame& f, std::int64_t t) {
        float* steps = f.at(fades, t);
        f.k.fade(steps, added, nullptr, 0.0F, INFINITY, fades.count, steps, nullptr);
    });
    operations_.push_back(std::move(made));
}

}  // namespace octavo
