#!/usr/bin/env bash
# venv.sh DIR: creates a virtual environment with pip in DIR from the best Python there is, without root.
# PYTHON chooses one by name: PYTHON=python3.12 make install.
set -euo pipefail

dir=$1
fail() {
    printf 'error: %s\n' "$@" >&2
    exit 1
}
usable() { command -v "$1" >/dev/null && "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

python=
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if usable "$candidate"; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "octavo needs Python 3.11 or newer; looked for ${PYTHON:-python3, python3.13, python3.12, python3.11}" \
    "Debian 12, Ubuntu 24.04 and later: apt install python3 python3-venv; or set PYTHON=/path/to/python"

echo ">> $dir with $("$python" --version)"
rm -rf "$dir"
if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    "$python" -m venv "$dir"
elif "$python" -m pip --version >/dev/null 2>&1 && "$python" -m venv --without-pip "$dir" 2>/dev/null; then
    "$python" -m pip --python "$dir/bin/python" install --quiet pip   # Debian without python3-venv, but with python3-pip
elif command -v uv >/dev/null; then
    uv venv --quiet --seed --python "$python" "$dir"
else
    fail "$python cannot create virtual environments: ensurepip is missing" \
        "Debian and Ubuntu: apt install python3-venv (or, without root, install uv or another Python and set PYTHON)"
fi
