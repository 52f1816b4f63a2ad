#define OCTAVO_DRAW_LOOPS avx512_draw_loops
#include "sample.inl"
