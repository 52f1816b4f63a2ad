"""The CUDA kernels' sources on a CPU, under AddressSanitizer: shim_cases.py in processes of their own."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("shim_cases.py")
# Building the shim takes minutes on two cores: until that fits CI's budget it is asked for.
pytestmark = pytest.mark.skipif(
    "OCTAVO_TEST_SHIM" not in os.environ, reason="set OCTAVO_TEST_SHIM=1: minutes of building"
)
CASES = {
    "decode_mma": 60,
    "decode_simt": 30,
    "prefill_mma": 16,
    "prefill_simt": 12,
    "vllm": 20,
    "merge": 40,
    "write": 60,
    "blocks": 30,
    "layout": 20,
    "convert": 30,
    "rows": 30,
    "sample": 30,
    "refused": 5,
    "plan": 2,
    "ops": 3,
    "compat": 3,
}


def library(name: str) -> str:
    """Where the compiler keeps one of its libraries."""
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


@pytest.fixture(scope="session")
def shim() -> Path:
    """The folder of _C_cuda_shim, built incrementally."""
    pybind11 = pytest.importorskip("pybind11")
    if platform.machine() not in ("x86_64", "AMD64") or not sys.platform.startswith("linux"):
        pytest.skip("the shim changes stacks as x86-64 Linux does")
    tools = {name: shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent)) for name in TOOLS}
    missing = [name for name, path in tools.items() if path is None]
    if missing or not os.path.isabs(library("libasan.so")):
        pytest.skip(f"cannot build the shim without {', '.join(missing) or 'libasan'}")
    build = ROOT / "build" / f"cuda-shim-{sys.implementation.cache_tag}"
    configure = [
        *(tools["cmake"], "-S", ROOT / "csrc/cuda/shim", "-B", build, "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tools['ninja']}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
    ]
    for command in (configure, [tools["cmake"], "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return build


TOOLS = ("g++", "cmake", "ninja")


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first of them builds
@pytest.mark.parametrize("group", CASES)
def test_kernels_agree_with_float64(shim: Path, group: str) -> None:
    environment = os.environ | {
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    command = [sys.executable, SCRIPT, shim, group, str(CASES[group]), "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
