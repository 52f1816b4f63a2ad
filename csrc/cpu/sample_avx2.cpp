#define OCTAVO_DRAW_LOOPS avx2_draw_loops
#include "sample.inl"
