"""What `make` builds where: each target with a CMake that only writes down how it is called."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEADERS = Path(sysconfig.get_path("include")) / "Python.h"
CMAKE = """
import os, pathlib, sys
words = sys.argv[1:]
if words[0] == "-S":
    build = pathlib.Path(words[words.index("-B") + 1])
    build.mkdir(parents=True, exist_ok=True)
    cache = build / "CMakeCache.txt"
    kept = dict(line.split("=", 1) for line in cache.read_text().splitlines()) if cache.exists() else {}
    kept["CMAKE_HOME_DIRECTORY:INTERNAL"] = f"{os.getcwd()}/csrc"
    given = [word[2:].split("=", 1) for word in words if word.startswith("-DOCTAVO_")]
    kept |= {name + ":STRING": value for name, value in given}
    cache.write_text("".join(f"{name}={value}\\n" for name, value in kept.items()))
    (build / "build.ninja").touch()
    (build / "called").write_text(" ".join(words))
"""
pytestmark = [
    pytest.mark.skipif(not HEADERS.exists(), reason="Python's headers are missing"),
    pytest.mark.skipif(not shutil.which("make"), reason="there is no make"),
    pytest.mark.skipif(not shutil.which("c++"), reason="there is no C++ compiler"),
]


class Checkout:
    """The files that `make` reads, an environment that is complete, and a CMake that builds nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("Makefile", "tools/build_extension.sh", "pyproject.toml", "requirements/constraints.txt"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
        binaries = folder / ".venv/bin"
        binaries.mkdir(parents=True)
        (folder / "gpu_worker").mkdir()
        (binaries / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        (binaries / "cmake").write_text(f"#!{sys.executable}{CMAKE}")
        for program in binaries.iterdir():
            program.chmod(0o755)
        for marker in ("to-run", ""):
            (folder / ".venv" / f".installed{marker and '-' + marker}").touch()

    def options(self, *words: str, **variables: str) -> set[str]:
        """What CMake was told of octavo by `make` and these words; empty if it was not asked to configure."""
        for called in self.folder.glob("build/*/called"):
            called.unlink()
        kept = {name: value for name, value in os.environ.items() if name not in ("CI", "ISAS", "CUDA", "CMAKE_ARGS")}
        environment = {name: value for name, value in kept.items() if not name.startswith("MAKE")} | variables
        subprocess.run(["make", "--silent", *words], cwd=self.folder, env=environment, check=True)
        told = "".join(called.read_text() for called in self.folder.glob("build/*/called")).split()
        named = dict(word.removeprefix("-DOCTAVO_").split("=") for word in told if word.startswith("-DOCTAVO_"))
        return {f"{name}={value}" for name, value in named.items()}  # of two values CMake takes the second


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_running_needs_this_machines_instruction_set(checkout: Checkout) -> None:
    assert checkout.options("extension") == {"ISAS=native"}
    assert not checkout.options("extension")


def test_only_ci_builds_cuda_without_a_device(checkout: Checkout) -> None:
    assert checkout.options("install") == {"ISAS=tests"}
    assert not checkout.options("install")
    assert checkout.options("install", CI="true") == {"CUDA=NVCC"}
    assert checkout.options("cuda") == {"CUDA=ON"}


def test_running_keeps_what_tests_have_built(checkout: Checkout) -> None:
    checkout.options("install")
    assert not checkout.options("extension")
    assert checkout.options("extension", ISAS="native") == {"ISAS=native"}
