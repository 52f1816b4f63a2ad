#include "sample.cuh"

#include "common/dispatch.h"

namespace octavo::cuda {

void sample(const TensorRef& ids, const TensorRef& logits, const TensorRef& temperature, const TensorRef& top_k,
            const TensorRef& top_p, const TensorRef& min_p, const TensorRef& filters, const TensorRef& seed,
            const TensorRef& branch, const TensorRef& index, StreamHandle stream) {
    expect(logits, "logits", {kAny, kAny});
    const std::int64_t rows = logits.shape[0];
    require(logits.shape[1] > 0, "logits", "has no columns");
    expect(ids, "ids", {rows}, DType::kI64);
    expect(temperature, "temperature", {rows}, DType::kF32);
    expect(top_k, "top_k", {rows}, DType::kI32);
    expect(top_p, "top_p", {rows}, DType::kF32);
    expect(min_p, "min_p", {rows}, DType::kF32);
    expect(filters, "filters", {rows, filters::kColumns}, DType::kF32);
    expect(seed, "seed", {rows}, DType::kI64);
    expect(branch, "branch", {rows}, DType::kI64);
    expect(index, "index", {rows}, DType::kI64);
    expect_apart(ids, "ids", {&logits, &temperature, &top_k, &top_p, &min_p, &filters, &seed, &branch, &index});
    if (rows == 0) {
        return;
    }
    with_float(logits.dtype, "logits", [&](auto tag) {
        using T = typename decltype(tag)::Type;
        const SampleParams<T> params{
            ids.as<std::int64_t>(),   logits.as<T>(),          temperature.as<float>(),
            top_k.as<std::int32_t>(), top_p.as<float>(),       min_p.as<float>(),
            filters.as<float>(),      seed.as<std::int64_t>(), branch.as<std::int64_t>(),
            index.as<std::int64_t>(), logits.stride[0],        static_cast<int>(logits.shape[1])};
        launch(sample_kernel<T>, dim3(static_cast<unsigned>(rows)), kSampleThreads, sizeof(SampleShared),
               as_stream(stream), params);
    });
}

}  // namespace octavo::cuda
