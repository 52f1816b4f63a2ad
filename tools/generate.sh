#!/usr/bin/env bash
# generate.sh [--check]: writes octavo/v1 and octavo/internal/v1 from protos/, or with --check fails if the committed ones
# differ.
#
# protoc comes from an environment of its own, .venv-protoc, whose grpcio-tools is older than the grpcio octavo runs on:
# stubs work with every protobuf from the one they were generated for upwards, so the oldest generator serves most users.
set -euo pipefail
cd "$(dirname "$0")/.."

env=.venv-protoc
pins=requirements/protoc.txt
if ! cmp -s "$pins" "$env/installed.txt"; then
    tools/venv.sh "$env"
    "$env/bin/pip" install --quiet --disable-pip-version-check -r "$pins"
    cp "$pins" "$env/installed.txt"
fi

fresh=$(mktemp -d)
trap 'rm -rf "$fresh"' EXIT
"$env/bin/python" -W ignore -m grpc_tools.protoc -Iprotos \
    --python_out="$fresh" --pyi_out="$fresh" --grpc_python_out="$fresh" protos/octavo/v1/*.proto protos/octavo/internal/v1/*.proto
cp protos/service_config.json "$fresh/octavo/v1/" # the SDK reads it there, since an installed octavo has no protos/

for package in octavo/v1 octavo/internal/v1; do
    cp "$package/__init__.py" "$fresh/$package/"
    if [ "${1:-}" = --check ]; then
        diff -ru --exclude=__pycache__ "$package" "$fresh/$package" || {
            echo "error: $package is not what protos/ says: run 'make generate' and commit the result" >&2
            exit 1
        }
        echo "$package matches protos/"
    else
        rm -f "$package"/*_pb2.py "$package"/*_pb2.pyi "$package"/*_pb2_grpc.py
        cp "$fresh/$package"/* "$package/"
        echo "wrote $(find "$package" -name '*_pb2*' -not -path '*/__pycache__/*' | wc -l) files to $package"
    fi
done
