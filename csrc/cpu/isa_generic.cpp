#define OCTAVO_ISA Isa::kGeneric
#define OCTAVO_TABLE generic_kernels
#include "kernels.inl"
