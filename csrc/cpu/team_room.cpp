#include "team_room.h"

#include "lines.h"

namespace octavo {
namespace {

// A step has two parts, at most: each has whole groups of columns.
std::int64_t num_inputs(std::int64_t tokens, std::int64_t widest) {
    return volume({volume({tokens}) + 2 * kInputColumns, widest / kBlock});
}

}  // namespace

TeamRoom::TeamRoom(const Team& team, const LlamaSizes& sizes, std::int64_t tokens, std::int64_t plan_bytes)
    : TeamOrder(team, tokens, plan_bytes), widest_(widest(sizes)) {
    require(team.room_bytes() >= bytes(sizes, tokens, plan_bytes), "memory", "has too little room for this model");
    char* place = team.room() + room_bytes(plan_bytes);
    const auto take = [&place](std::int64_t count, auto* found) {
        found = reinterpret_cast<decltype(found)>(place);
        place += lines(count * static_cast<std::int64_t>(sizeof(*found)));
        return found;
    };
    const auto floats = [&take](std::int64_t rows, std::int64_t columns) {
        return take(rows * columns, static_cast<float*>(nullptr));
    };
    x = floats(tokens, sizes.hidden);
    attended = floats(tokens, sizes.heads * sizes.head_dim);
    inner = floats(tokens, inner_of(sizes));
    queries = floats(tokens, sizes.heads * sizes.head_dim);
    keys = floats(tokens, sizes.kv_heads * sizes.head_dim);
    hidden = floats(kRows, sizes.hidden);
    logits = floats(kRows, sizes.vocab);
    normed = floats(tokens, sizes.hidden);
    apart = floats(sizes.sums_apart() ? tokens : 0, sizes.hidden);
    inputs_.digits = take(num_inputs(tokens, widest_), inputs_.digits);
    inputs_.bf16 = take(num_inputs(tokens, widest_), inputs_.bf16);
}

Inputs TeamRoom::inputs_from(std::int64_t token) const {
    const std::int64_t first = num_blocks(token, widest_);
    return {inputs_.digits + first, inputs_.bf16 + first};
}

std::int64_t TeamRoom::bytes(const LlamaSizes& s, std::int64_t tokens, std::int64_t plan_bytes) {
    require(tokens > 0 && plan_bytes > 0, "tokens", "leave no room for a step");
    const std::int64_t queries = volume({4, tokens, s.heads, s.head_dim}), hidden = volume({4, tokens, s.hidden});
    const std::int64_t inputs = num_inputs(tokens, widest(s));
    return room_bytes(plan_bytes) + (s.sums_apart() ? 3 : 2) * lines(hidden) + 2 * lines(queries) +
           lines(volume({4, tokens, inner_of(s)})) + lines(volume({4, tokens, s.kv_heads, s.head_dim})) +
           lines(volume({4, kRows, s.hidden})) + lines(volume({4, kRows, s.vocab})) +
           lines(volume({sizeof(InputBlock), inputs})) + lines(volume({sizeof(Bf16Block), inputs}));
}

TensorRef floats(float* data, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
    TensorRef tensor;
    tensor.data = data;
    tensor.ndim = 2;
    tensor.shape[0] = rows;
    tensor.shape[1] = columns;
    tensor.stride[0] = stride;
    tensor.stride[1] = 1;
    return tensor;
}

}  // namespace octavo
