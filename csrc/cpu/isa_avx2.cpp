#define OCTAVO_ISA Isa::kAvx2
#define OCTAVO_TABLE avx2_kernels
#include "kernels.inl"
