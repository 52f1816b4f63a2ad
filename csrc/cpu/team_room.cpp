#include "team_room.h"

#include "lines.h"

namespace octavo {

TeamRoom::TeamRoom(const Team& team, const LlamaSizes& sizes, std::int64_t tokens, std::int64_t plan_bytes)
    : TeamOrder(team, tokens, plan_bytes) {
    require(team.room_bytes() >= bytes(sizes, tokens, plan_bytes), "memory", "has too little room for this model");
    char* place = team.room() + room_bytes(plan_bytes);
    const auto floats = [&place](std::int64_t rows, std::int64_t columns) {
        auto* found = reinterpret_cast<float*>(place);
        place += lines(rows * columns * 4);
        return found;
    };
    x = floats(tokens, sizes.hidden);
    attended = floats(tokens, sizes.heads * sizes.head_dim);
    inner = floats(tokens, inner_of(sizes));
    queries = floats(tokens, sizes.heads * sizes.head_dim);
    keys = floats(tokens, sizes.kv_heads * sizes.head_dim);
    hidden = floats(kRows, sizes.hidden);
    logits = floats(kRows, sizes.vocab);
}

std::int64_t TeamRoom::bytes(const LlamaSizes& s, std::int64_t tokens, std::int64_t plan_bytes) {
    require(tokens > 0 && plan_bytes > 0, "tokens", "leave no room for a step");
    return room_bytes(plan_bytes) + lines(volume({4, tokens, s.hidden})) +
           2 * lines(volume({4, tokens, s.heads, s.head_dim})) + lines(volume({4, tokens, inner_of(s)})) +
           lines(volume({4, tokens, s.kv_heads, s.head_dim})) + lines(volume({4, kRows, s.hidden})) +
           lines(volume({4, kRows, s.vocab}));
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
