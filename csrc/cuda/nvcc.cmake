# Finds nvcc, and tries it before CMake does: where it cannot work here, the CPU's module is still built.
# Sets OCTAVO_NVCC and OCTAVO_NVCC_PROBLEM, which is empty where nvcc compiles for every architecture wanted.
set(OCTAVO_CUDA_ARCHITECTURES "80;90a-real" CACHE STRING "What the kernels are compiled for; release: what wheels and images have")
if(OCTAVO_CUDA_ARCHITECTURES STREQUAL "release")   # of nvcc 12.8 or later; nvcc 13.0 spills for sm_100 and sm_120: PTX alone
  set(OCTAVO_CUDA_ARCHITECTURES "80;89-real;90a-real;100-virtual;120-virtual")
endif()
find_program(OCTAVO_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)

set(OCTAVO_NVCC_PROBLEM "")
if(NOT OCTAVO_NVCC)
  set(OCTAVO_NVCC_PROBLEM "there is no nvcc (CUDA_HOME says where)")
  return()
endif()

set(wanted "${OCTAVO_NVCC} for ${OCTAVO_CUDA_ARCHITECTURES}")
if(NOT OCTAVO_NVCC_TRIED STREQUAL wanted)
  set(try ${CMAKE_CURRENT_BINARY_DIR}/try.cu)
  file(WRITE ${try} "#include <vector>\n__global__ void try_it() {}\n")
  set(gencode "")
  foreach(architecture IN LISTS OCTAVO_CUDA_ARCHITECTURES)
    string(REGEX REPLACE "-.*" "" number ${architecture})
    list(APPEND gencode -gencode arch=compute_${number},code=sm_${number})
  endforeach()
  execute_process(COMMAND ${OCTAVO_NVCC} -std=c++17 ${gencode} -ccbin ${CMAKE_CXX_COMPILER} -c ${try} -o ${try}.o
    RESULT_VARIABLE failed OUTPUT_VARIABLE said ERROR_VARIABLE said)
  if(failed)
    string(STRIP "${said}" said)
    set(OCTAVO_NVCC_PROBLEM
      "${OCTAVO_NVCC} does not compile for ${OCTAVO_CUDA_ARCHITECTURES} with ${CMAKE_CXX_COMPILER}: ${said}")
    return()
  endif()
  set(OCTAVO_NVCC_TRIED "${wanted}" CACHE INTERNAL "What was seen to work")
endif()
