#include "logits.cuh"

#include "api.h"
#include "common/dispatch.h"
#include "device.h"

namespace octavo::cuda {

void penalize(const TensorRef& logits, const TensorRef& offsets, const TensorRef& ids, const TensorRef& counts,
              const TensorRef& bias, const TensorRef& repetition, const TensorRef& presence, const TensorRef& frequency,
              StreamHandle stream) {
    expect(logits, "logits", {kAny, kAny});
    const std::int64_t rows = logits.shape[0];
    expect(offsets, "offsets", {rows + 1}, DType::kI32);
    expect(ids, "ids", {kAny}, DType::kI64);
    expect(counts, "counts", {ids.shape[0]}, DType::kI32);
    if (bias.given()) {
        expect(bias, "bias", {ids.shape[0]}, DType::kF32);
    }
    expect(repetition, "repetition", {rows}, DType::kF32);
    expect(presence, "presence", {rows}, DType::kF32);
    expect(frequency, "frequency", {rows}, DType::kF32);
    expect_apart(logits, "logits", {&offsets, &ids, &counts, &bias, &repetition, &presence, &frequency});
    with_float(logits.dtype, "logits", [&](auto tag) {
        using T = typename decltype(tag)::Type;
        const PenaltyParams<T> params{logits.as<T>(),         offsets.as<std::int32_t>(),
                                      ids.as<std::int64_t>(), counts.as<std::int32_t>(),
                                      bias.as<float>(),       repetition.as<float>(),
                                      presence.as<float>(),   frequency.as<float>(),
                                      logits.stride[0],       ids.shape[0],
                                      fault_word(),           static_cast<int>(logits.shape[1])};
        if (rows > 0) {
            launch(penalize_kernel<T>, dim3(static_cast<unsigned>(rows)), kLogitThreads, 0, as_stream(stream), params);
        }
    });
}

void logprobs(const TensorRef& chosen, const TensorRef& values, const TensorRef& tokens, const TensorRef& logits,
              const TensorRef& ids, StreamHandle stream) {
    expect(logits, "logits", {kAny, kAny});
    const std::int64_t rows = logits.shape[0];
    require(logits.shape[1] > 0, "logits", "has no columns");
    expect(ids, "ids", {rows}, DType::kI64);
    expect(chosen, "chosen", {rows}, DType::kF32);
    expect(values, "values", {rows, kAny}, DType::kF32);
    expect(tokens, "tokens", {rows, values.shape[1]}, DType::kI64);
    expect_dense(values, "values");
    expect_dense(tokens, "tokens");
    expect_apart(chosen, "chosen", {&logits, &ids});
    expect_apart(values, "values", {&chosen, &logits, &ids});
    expect_apart(tokens, "tokens", {&chosen, &values, &logits, &ids});
    with_float(logits.dtype, "logits", [&](auto tag) {
        using T = typename decltype(tag)::Type;
        const LogprobParams<T> params{logits.as<T>(),
                                      ids.as<std::int64_t>(),
                                      chosen.as<float>(),
                                      values.as<float>(),
                                      tokens.as<std::int64_t>(),
                                      logits.stride[0],
                                      static_cast<int>(logits.shape[1]),
                                      static_cast<int>(values.shape[1])};
        if (rows > 0) {
            launch(logprobs_kernel<T>, dim3(static_cast<unsigned>(rows)), kLogitThreads, 128, as_stream(stream),
                   params);
        }
    });
}

}  // namespace octavo::cuda
