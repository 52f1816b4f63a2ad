#!/usr/bin/env bash
# promtool.sh DIR: puts promtool, which checks alert rules, into DIR, unless it is there. It comes from Debian's package
# `prometheus`, which is unpacked and never installed. Without apt-get nothing is done, and the tests that need it are skipped.
set -euo pipefail
dir=$(realpath "$1")
[ -x "$dir/promtool" ] && exit
command -v apt-get > /dev/null && command -v dpkg-deb > /dev/null || exit 0

download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
cd "$download"
if ! apt-get download prometheus > /dev/null 2>&1; then
    echo ">> promtool is not here: apt-get cannot download prometheus (apt-get update)"
    exit 0
fi
dpkg-deb -x prometheus_*.deb unpacked
install -m 755 unpacked/usr/bin/promtool "$dir/promtool"
echo ">> $("$dir/promtool" --version 2>&1 | head -1)"
