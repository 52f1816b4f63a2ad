#include <algorithm>

#include "kernels.h"
#include "octavo/api.h"
#include "octavo/check.h"
#include "octavo/pool.h"

namespace octavo {
namespace {

constexpr std::int64_t kColumns = 64;  // of a matrix, for one thread at a time
constexpr std::int64_t kLines = 512;   // matrices of one column

}  // namespace

void check::linear_recurrence(const TensorRef& out, const TensorRef& state, const TensorRef& queries,
                              const TensorRef& keys, const TensorRef& values, const TensorRef& decays,
                              const TensorRef& rates) {
    expect(state, "state", {kAny, kAny, kAny}, DType::kF32);
    const std::int64_t heads = state.shape[0], rows = state.shape[1], columns = state.shape[2];
    expect(values, "values", {kAny, heads, columns}, DType::kF32);
    const std::int64_t tokens = values.shape[0];
    expect(keys, "keys", {tokens, kAny, rows}, DType::kF32);
    const std::int64_t key_heads = keys.shape[1];
    require(key_heads > 0 ? heads % key_heads == 0 : heads == 0, "keys", "do not divide the heads of state");
    expect(queries, "queries", {tokens, key_heads, rows}, DType::kF32);
    if (decays.ndim == 3) {
        expect(decays, "decays", {tokens, heads, rows}, DType::kF32);
    } else {
        expect(decays, "decays", {tokens, heads}, DType::kF32);
    }
    if (rates.given()) {
        expect(rates, "rates", {tokens, heads}, DType::kF32);
        expect_dense(rates, "rates");
    }
    expect(out, "out", {tokens, heads, columns}, DType::kF32);
    expect_dense(out, "out");
    expect_dense(state, "state");
    expect_dense(queries, "queries");
    expect_dense(keys, "keys");
    expect_dense(values, "values");
    expect_dense(decays, "decays");
    expect_apart(state, "state", {&queries, &keys, &values, &decays, &rates});
    expect_apart(out, "out", {&state, &queries, &keys, &values, &decays, &rates});
}

void linear_recurrence(const TensorRef& out, const TensorRef& state, const TensorRef& queries, const TensorRef& keys,
                       const TensorRef& values, const TensorRef& decays, const TensorRef& rates) {
    check::linear_recurrence(out, state, queries, keys, values, decays, rates);
    if (out.size() == 0) {
        return;
    }
    const std::int64_t heads = state.shape[0], columns = state.shape[2], narrow = keys.shape[1] * keys.shape[2];
    const RecurrenceJob job{const_cast<float*>(out.as<float>()),
                            const_cast<float*>(state.as<float>()),
                            queries.as<float>(),
                            keys.as<float>(),
                            values.as<float>(),
                            decays.as<float>(),
                            rates.given() ? rates.as<float>() : nullptr,
                            values.shape[0],
                            heads,
                            keys.shape[1],
                            heads / keys.shape[1],
                            state.shape[1],
                            columns,
                            decays.ndim == 3,
                            narrow,
                            narrow,
                            heads * columns,
                            decays.ndim == 3 ? heads * keys.shape[2] : heads,
                            heads,
                            heads * columns};
    Pool::instance().run([&](PoolThread& thread) {
        if (columns == 1 && job.rates == nullptr) {
            thread.each((heads + kLines - 1) / kLines, [&](std::int64_t i) {
                kernels().recur_lines(job, i * kLines, std::min(heads, (i + 1) * kLines));
            });
            return;
        }
        const std::int64_t shares = (columns + kColumns - 1) / kColumns;
        thread.each(heads * shares, [&](std::int64_t i) {
            const std::int64_t first = i % shares * kColumns;
            kernels().recur(job, i / shares, first, std::min(kColumns, columns - first),
                            thread.scratch(8 * job.key_dim + kColumns));
        });
    });
}

}  // namespace octavo
