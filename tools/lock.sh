#!/usr/bin/env bash
# lock.sh: writes what images install, with exact versions and hashes, from pyproject.toml and constraints.txt:
# requirements/{router,worker,worker-cuda}.txt. Those of worker.txt lack torch and the packages of CUDA, which the
# Dockerfile takes from an index of its own.
set -euo pipefail
cd "$(dirname "$0")/.."

env=.venv-images
tools/venv.sh "$env"
"$env/bin/pip" install --quiet --disable-pip-version-check -r requirements/images.txt

lock() { # NAME OPTIONS...
    "$env/bin/uv" pip compile --quiet pyproject.toml --extra traces "${@:2}" --constraint requirements/constraints.txt \
        --constraint <(echo torch==2.13.0) --generate-hashes --universal --python-version 3.11 --no-emit-index-url \
        --no-annotate --custom-compile-command 'make lock' --output-file "requirements/$1.txt"
    echo "wrote requirements/$1.txt: $(grep -c == "requirements/$1.txt") packages"
}

lock router --extra router
lock worker-cuda --extra worker
mapfile -t absent < <(sed -nE 's/^((torch|triton|cuda-|nvidia-)[a-z0-9-]*)==.*/--no-emit-package=\1/p' requirements/worker-cuda.txt)
lock worker --extra worker "${absent[@]}"
