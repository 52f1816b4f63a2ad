#define OCTAVO_DRAW_LOOPS generic_draw_loops
#include "sample.inl"
