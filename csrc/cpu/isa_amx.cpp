#define OCTAVO_ISA Isa::kAmx
#define OCTAVO_TABLE amx_kernels
#define OCTAVO_TILES
#include "kernels.inl"
