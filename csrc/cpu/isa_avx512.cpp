#define OCTAVO_ISA Isa::kAvx512
#define OCTAVO_TABLE avx512_kernels
#include "kernels.inl"
