#!/usr/bin/env bash
# Builds gpu_worker/_C_cpu*.so and, where nvcc and a device are, _C_cuda*.so in place, incrementally. Where no compiler or no
# Python headers are there, it says so and succeeds: octavo runs without its extension, only slower.
#   ISAS        native (this machine's instruction set: what a fresh build has), all, or tests (all, and emulated). A build that
#               has more than asked for stays as it is, unless ISAS=native.
#   CUDA        NVCC: the CUDA kernels are built wherever nvcc works, unless OCTAVO_CUDA=OFF was said before; ON: or it fails.
#   CMAKE_ARGS  more options, for example -DOCTAVO_CUDA=OFF or -DOCTAVO_WERROR=OFF. They are remembered.
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
option() { sed -n "s/^$1:[A-Z]*=//p" "$build/CMakeCache.txt" 2>/dev/null || true; }

options=()
cached || rm -rf "$build"
[ -f "$build/build.ninja" ] || options=(-DOCTAVO_ISAS=native)
has=$(option OCTAVO_ISAS)
case "${ISAS:-}:$has" in
    : | native:native | tests:tests | all:all | all:tests) ;;
    :*) ;;
    *) options+=("-DOCTAVO_ISAS=$ISAS") ;;
esac
# A checkout may have moved to another machine.
machine=$(grep -m1 -E '^(flags|Features)' /proc/cpuinfo 2>/dev/null || uname -m)
[ "$machine" = "$(cat "$build/machine" 2>/dev/null)" ] || options+=(-UOCTAVO_NATIVE_ISA)
cuda=$(option OCTAVO_CUDA)
if [ -n "${CUDA:-}" ] && [ "$cuda" != "$CUDA" ] && { [ "$CUDA" = ON ] || [ "${cuda:-AUTO}" = AUTO ]; }; then
    options+=("-DOCTAVO_CUDA=$CUDA")
fi
if [ -n "${CMAKE_ARGS:-}" ] || [ ${#options[@]} -gt 0 ]; then
    # shellcheck disable=SC2086  # CMAKE_ARGS is a list
    "$bin/cmake" -S csrc -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$bin/ninja" -DPython_EXECUTABLE="$python" \
        -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" "${options[@]}" ${CMAKE_ARGS:-}
    echo "$machine" > "$build/machine"
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
