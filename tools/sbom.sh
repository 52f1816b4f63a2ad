#!/usr/bin/env bash
# sbom.sh DIR: writes the package list of each image as CycloneDX, DIR/{router,worker,worker-cuda}.cdx.json, from what its
# Dockerfile installs: names, exact versions and hashes. What Debian or Ubuntu brings is not in it: that is told by
# `docker buildx build --sbom=true`, or by `trivy image --format cyclonedx IMAGE`.
set -euo pipefail
cd "$(dirname "$0")/.."
dir=$1

env=.venv-images
[ -x "$env/bin/cyclonedx-py" ] || {
    tools/venv.sh "$env"
    "$env/bin/pip" install --quiet --disable-pip-version-check -r requirements/images.txt
}
mkdir -p "$dir"
for image in router worker worker-cuda; do
    { cat "requirements/$image.txt" && sed -n 's/^ARG TORCH=//p' "k8s/docker/$image.Dockerfile"; } |
        PYTHONWARNINGS=ignore "$env/bin/cyclonedx-py" requirements --spec-version 1.6 --output-reproducible --of JSON \
            --pyproject pyproject.toml --output-file "$dir/$image.cdx.json" -
    echo "wrote $dir/$image.cdx.json"
done
