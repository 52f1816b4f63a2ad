#!/usr/bin/env bash
# clients.sh LANGUAGE: builds examples/LANGUAGE, after installing from Debian what its build needs and is missing.
#
# Where nothing is missing it needs no root. Where something is missing and this user may not install it, it exits with
# 77 and says so in its last line; every other failure is an error.
set -euo pipefail
cd "$(dirname "$0")/../examples/$1"

skip() {
    echo "$1 needs $packages: $2"
    exit 77
}

unset MAKEFLAGS MAKELEVEL MFLAGS # of the make that may have called this
if ! make --silent tools; then
    packages=$(make --silent packages)
    command -v apt-get > /dev/null || skip "$1" "there is no apt-get to install them with"
    if [ "$(id -u)" = 0 ]; then
        root=()
    elif sudo -n true 2> /dev/null; then
        root=(sudo -n)
    else
        skip "$1" "ask root to run: apt-get install --no-install-recommends $packages"
    fi
    apt=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get --quiet --quiet -o DPkg::Lock::Timeout=300)
    echo ">> $1: apt-get install $packages"
    "${apt[@]}" update < /dev/null
    # shellcheck disable=SC2086  # a list of words
    "${apt[@]}" install --yes --no-install-recommends $packages < /dev/null
    make --silent tools || {
        echo "error: $1: something is still missing after apt-get install $packages" >&2
        exit 1
    }
fi
make --silent build < /dev/null
