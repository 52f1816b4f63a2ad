// Marks functions that are the same on the host and on a GPU.
#pragma once

#if defined(__CUDACC__)
#define OCTAVO_ANYWHERE __host__ __device__ __forceinline__
#else
#define OCTAVO_ANYWHERE inline
#endif
