#define OCTAVO_ISA Isa::kEmulated
#define OCTAVO_TABLE emulated_kernels
#define OCTAVO_TILES
#define OCTAVO_EMULATED_TILES
#include "kernels.inl"
