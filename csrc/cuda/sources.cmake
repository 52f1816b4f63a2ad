# The kernels and their host side.
set(OCTAVO_CUDA_SOURCES arch/launch.cu attention.cu attention_simt.cu cache.cu common/kv_cache.cu device.cu inst/linear_fp8.cu linear.cu logits.cu rows.cu sample.cu swap.cu
  vllm_attention.cu)
foreach(type f16 bf16)
  list(APPEND OCTAVO_CUDA_SOURCES inst/linear_mma_${type}.cu inst/linear_packed_${type}.cu)
  foreach(dim 64 128 256)
    list(APPEND OCTAVO_CUDA_SOURCES inst/decode_mma_${type}_${dim}.cu inst/prefill_mma_${type}_${dim}.cu)
  endforeach()
endforeach()
list(TRANSFORM OCTAVO_CUDA_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
