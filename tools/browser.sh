#!/usr/bin/env bash
# browser.sh: prints the path of a headless Chromium, after installing Debian's and Node if they are missing.
#
# Where something is missing and this user may not install it, it exits with 77 and says so in its last line.
set -euo pipefail

find_browser() {
    for name in chromium-headless-shell chromium chromium-browser google-chrome; do
        command -v "$name" && return
    done
    return 1
}

packages=()
find_browser > /dev/null || packages+=(chromium-headless-shell)
command -v node > /dev/null || packages+=(nodejs)
command -v npm > /dev/null || packages+=(npm)
if [ "${#packages[@]}" -gt 0 ]; then
    skip() {
        echo "the page needs ${packages[*]}: $1"
        exit 77
    }
    command -v apt-get > /dev/null || skip "there is no apt-get to install them with"
    if [ "$(id -u)" = 0 ]; then
        root=()
    elif sudo -n true 2> /dev/null; then
        root=(sudo -n)
    else
        skip "ask root to run: apt-get install --no-install-recommends ${packages[*]}"
    fi
    apt=("${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get --quiet --quiet -o DPkg::Lock::Timeout=300)
    "${apt[@]}" update < /dev/null >&2
    "${apt[@]}" install --yes --no-install-recommends "${packages[@]}" < /dev/null >&2
fi
find_browser
