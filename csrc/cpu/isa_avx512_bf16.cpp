#define OCTAVO_ISA Isa::kAvx512Bf16
#define OCTAVO_TABLE avx512_bf16_kernels
#include "kernels.inl"
