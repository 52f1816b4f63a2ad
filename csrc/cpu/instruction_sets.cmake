# Which instruction sets the kernels are compiled for: sets `isas`, and compiles a file for each.
set(OCTAVO_ISAS all CACHE STRING
  "native (this machine's), all, tests (all, and emulated), or some of them: generic;avx2;avx512;avx512_bf16;amx;emulated")
set(octavo_known_isas generic)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND octavo_known_isas avx2 avx512 avx512_bf16 amx)
endif()

# What a process on this machine would choose: asked of the same code.
function(octavo_find_native_isa)
  set(try ${CMAKE_CURRENT_BINARY_DIR}/try_isa.cpp)
  file(WRITE ${try} "#include \"${CMAKE_CURRENT_SOURCE_DIR}/cpu/isa.cpp\"\n#include <cstdio>\n"
    "int main() { std::puts(octavo::isa_name(octavo::best_isa())); }\n")
  unset(octavo_isa_runs CACHE)
  unset(octavo_isa_compiles CACHE)
  try_run(octavo_isa_runs octavo_isa_compiles ${CMAKE_CURRENT_BINARY_DIR}/try_isa ${try}
    CMAKE_FLAGS "-DINCLUDE_DIRECTORIES=${CMAKE_CURRENT_SOURCE_DIR}/include" RUN_OUTPUT_VARIABLE said)
  string(STRIP "${said}" said)
  if(NOT said IN_LIST octavo_known_isas)
    message(FATAL_ERROR "This machine's instruction set was not found: ${said}")
  endif()
  set(OCTAVO_NATIVE_ISA ${said} CACHE INTERNAL "The instruction set of the machine that builds")
endfunction()

if(OCTAVO_ISAS STREQUAL "native")
  if(NOT OCTAVO_NATIVE_ISA)
    octavo_find_native_isa()
  endif()
  set(isas ${OCTAVO_NATIVE_ISA})
elseif(OCTAVO_ISAS STREQUAL "all")
  set(isas ${octavo_known_isas})
elseif(OCTAVO_ISAS STREQUAL "tests")
  set(isas ${octavo_known_isas} emulated)
else()
  set(isas ${OCTAVO_ISAS})
endif()
if("amx" IN_LIST isas)  # tiles are compared with it before they are used
  list(APPEND isas avx512_bf16)
  list(REMOVE_DUPLICATES isas)
endif()

set(avx2 -mavx2 -mfma -mf16c)
# GCC 12 warns of the undefined operands in its own AVX-512 header.
set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni -mprefer-vector-width=256
  -Wno-uninitialized -Wno-maybe-uninitialized)
set(avx512_bf16 ${avx512} -mavx512bf16)
set(amx ${avx512_bf16})
set(generic "")
set(emulated "")
set(built "")
foreach(isa IN LISTS isas)
  if(NOT isa IN_LIST octavo_known_isas AND NOT isa STREQUAL "emulated")
    message(FATAL_ERROR "OCTAVO_ISAS has ${isa}; here it can be native, all, tests, or some of ${octavo_known_isas};emulated")
  endif()
  target_sources(octavo_cpu PRIVATE cpu/isa_${isa}.cpp)
  set_source_files_properties(cpu/isa_${isa}.cpp PROPERTIES COMPILE_OPTIONS "${${isa}}"
    OBJECT_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/cpu/kernels.inl")
  string(TOUPPER "OCTAVO_HAS_${isa}" defined)
  list(APPEND built ${defined})
endforeach()
set_source_files_properties(cpu/kernels.cpp PROPERTIES COMPILE_DEFINITIONS "${built}")
message(STATUS "Kernels for ${isas}")
