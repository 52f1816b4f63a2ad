#include "element.h"
#include "ref.h"

namespace octavo::ref {

void linear_recurrence(const TensorRef& out, const TensorRef& state, const TensorRef& queries, const TensorRef& keys,
                       const TensorRef& values, const TensorRef& decays, const TensorRef& rates) {
    check::linear_recurrence(out, state, queries, keys, values, decays, rates);
    const std::int64_t tokens = out.shape[0], heads = state.shape[0], rows = state.shape[1], columns = state.shape[2];
    for (std::int64_t head = 0; head < heads; ++head) {
        const std::int64_t narrow = head / (heads / keys.shape[1]);
        for (std::int64_t token = 0; token < tokens; ++token) {
            for (std::int64_t column = 0; column < columns; ++column) {
                double known = 0, read = 0;
                for (std::int64_t k = 0; k < rows; ++k) {
                    const double decay = decays.ndim == 3 ? get(decays, token, head, k) : get(decays, token, head);
                    put(state, get(state, head, k, column) * decay, head, k, column);
                    known += get(state, head, k, column) * get(keys, token, narrow, k);
                }
                double added = get(values, token, head, column);
                if (rates.given()) {
                    added = (added - known) * get(rates, token, head);
                }
                for (std::int64_t k = 0; k < rows; ++k) {
                    const double now = get(state, head, k, column) + get(keys, token, narrow, k) * added;
                    put(state, now, head, k, column);
                    read += get(state, head, k, column) * get(queries, token, narrow, k);
                }
                put(out, read, token, head, column);
            }
        }
    }
}

}  // namespace octavo::ref
