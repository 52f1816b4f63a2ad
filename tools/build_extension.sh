#!/usr/bin/env bash
# Builds gpu_worker/_C_cpu*.so and, where nvcc works, _C_cuda*.so in place, incrementally. Where no compiler or no Python
# headers are there, it says so and succeeds: octavo runs without its extension, only slower. CMAKE_ARGS adds options and
# configures anew, for example -DOCTAVO_CUDA=OFF (or AUTO again, after nvcc was installed), -DOCTAVO_WERROR=OFF.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${1:-$PWD/.venv}/bin
python=$bin/python

without() {
    rm -f gpu_worker/_C_*.so   # of an earlier build: the program refuses one that is not of its own sources
    echo "note: no native extension: $1. octavo works without it, only slower." >&2
    exit 0
}

command -v "${CXX:-c++}" >/dev/null || without "there is no C++ compiler (Debian and Ubuntu: apt install g++)"
read -r abi headers < <("$python" -c 'import sys, sysconfig; print(sys.implementation.cache_tag, sysconfig.get_path("include"))')
[ -f "$headers/Python.h" ] || without "Python's headers are missing (Debian and Ubuntu: apt install python3-dev)"

build=build/csrc-$abi
cached() { grep -qxF "CMAKE_HOME_DIRECTORY:INTERNAL=$PWD/csrc" "$build/CMakeCache.txt" 2>/dev/null; }
if [ -n "${CMAKE_ARGS:-}" ] || ! { cached && [ -f "$build/build.ninja" ]; }; then
    cached || rm -rf "$build"
    # shellcheck disable=SC2086  # CMAKE_ARGS is a list
    "$bin/cmake" -S csrc -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DPython_EXECUTABLE="$python" \
        -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" ${CMAKE_ARGS:-}
fi

# The CPU's module is in place before nvcc begins.
made() { "$bin/cmake" --build "$build" --target "_C_$1" && "$bin/cmake" --install "$build" --component "$1" --prefix . >/dev/null; }
made cpu
if grep -q "^OCTAVO_CUDA_BUILT:INTERNAL=ON" "$build/CMakeCache.txt"; then
    built=("gpu_worker/_C_cuda.$abi"-*.so)
    [ -e "${built[0]}" ] || echo "note: compiling the CUDA kernels takes minutes the first time; CMAKE_ARGS=-DOCTAVO_CUDA=OFF leaves them out." >&2
    made cuda || {
        echo "error: the CUDA kernels did not compile. What was built for the CPU is in place." >&2
        echo "CMAKE_ARGS=-DOCTAVO_CUDA=OFF leaves them out; CMAKE_ARGS=-DOCTAVO_WERROR=OFF lets warnings and spills pass." >&2
        exit 1
    }
else
    rm -f "gpu_worker/_C_cuda.$abi"-*.so   # of an earlier build, and not what the sources say now
fi
