#!/usr/bin/env bash
# redis.sh: sees to it that there is a redis-server of version 7 or later, by installing Debian's if there is none.
#
# It starts no service. Where this user may not install it, it exits with 77 and says so in its last line.
set -euo pipefail

if ! command -v redis-server > /dev/null; then
    skip() {
        echo "redis-server is missing: $1"
        exit 77
    }
    command -v apt-get > /dev/null || skip "there is no apt-get to install it with"
    if [ "$(id -u)" = 0 ]; then
        root=()
    elif sudo -n true 2> /dev/null; then
        root=(sudo -n)
    else
        skip "ask root to run: apt-get install --no-install-recommends redis-server"
    fi
    # RUNLEVEL=1: the package's own server, on port 6379, is not started
    apt=("${root[@]}" env RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get --quiet --quiet -o DPkg::Lock::Timeout=300)
    "${apt[@]}" update < /dev/null >&2
    "${apt[@]}" install --yes --no-install-recommends redis-server < /dev/null >&2
fi
found=$(redis-server --version)
[[ $found =~ v=([0-9]+)\. && ${BASH_REMATCH[1]} -ge 7 ]] || {
    echo "version 7 or later is needed, for functions: $found"
    exit 77
}
