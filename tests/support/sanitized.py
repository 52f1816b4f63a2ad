"""Builds of the extension's sources with AddressSanitizer and UBSan, and processes that can load them."""

import fcntl
import functools
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class CannotBuild(Exception):
    """This machine lacks a tool or library; the message says which."""


@functools.cache
def tool(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise CannotBuild(f"there is no {name}")
    return found


@functools.cache
def library(name: str) -> str:
    """Where the compiler keeps one of its libraries."""
    command = [tool("g++"), f"-print-file-name={name}"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(found):
        raise CannotBuild(f"g++ has no {name}")
    return found


def folder(name: str) -> Path:
    """Where `build` builds it."""
    return ROOT / "build" / f"{name}-{sys.implementation.cache_tag}"


def build(source: str, name: str, *options: str) -> Path:
    """The folder in which a CMake project of ours was built, incrementally; one build of it at a time."""
    library("libasan.so")
    try:
        import pybind11
    except ImportError as error:
        raise CannotBuild("pybind11 is not installed") from error
    built = folder(name)
    configure = [
        *(tool("cmake"), "-S", str(ROOT / source), "-B", str(built), "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dpybind11_DIR={pybind11.get_cmake_dir()}",
        *options,
    ]
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "2")
    built.mkdir(parents=True, exist_ok=True)
    with (built / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for command in (configure, [tool("cmake"), "--build", str(built), "--parallel", jobs]):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise AssertionError(done.stdout[-4000:] + done.stderr[-4000:])
    return built


def simulator() -> Path:
    """The folder of the CUDA kernels' sources for a CPU."""
    return build("tests/csrc/simt", "cuda-simt")


def cpu_extension() -> Path:
    """The folder of a _C_cpu that ends the process at the first wrong access or undefined operation."""
    return build(
        "csrc",
        "csrc-sanitized",
        "-DOCTAVO_CUDA=OFF",
        "-DOCTAVO_ISAS=tests",
        "-DOCTAVO_SANITIZE=address;undefined",
        "-DCMAKE_BUILD_TYPE=Debug",
        "-DCMAKE_CXX_FLAGS_DEBUG=-O1 -g1",
    )


def environment(*folders: Path) -> dict[str, str]:
    """The environment of a process that imports a build from `folders`. Leaks are ignored: torch and NumPy leak."""
    path = [*map(str, folders), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        "LD_PRELOAD": f"{library('libasan.so')} {library('libstdc++.so')}",
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(path),
    }


if __name__ == "__main__":
    print(simulator())
