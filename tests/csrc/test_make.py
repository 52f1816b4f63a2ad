"""What `make` builds where: each target with a CMake that only writes down how it is called."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

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


@pytest.mark.skipif(not HEADERS.exists(), reason="Python's headers are missing")
@pytest.mark.skipif(not (shutil.which("make") and shutil.which("c++")), reason="there is no make, or no C++ compiler")
def test_what_each_target_asks_for(root: Path, tmp_path: Path) -> None:
    """In a checkout whose environment is complete: running needs this machine's instruction set, and keeps what tests
    have built; only CI builds CUDA without a device."""

    def options(folder: str, *words: str, **variables: str) -> set[str]:
        """What CMake was told of octavo; empty if it was not asked to configure."""
        checkout = tmp_path / folder
        if not checkout.exists():
            make_checkout(root, checkout)
        unset = {"CI", "ISAS", "CUDA", "CMAKE_ARGS"}
        kept = {name: value for name, value in os.environ.items() if name not in unset and not name.startswith("MAKE")}
        subprocess.run(["make", "--silent", *words], cwd=checkout, env=kept | variables, check=True)
        told = "".join(called.read_text() for called in checkout.glob("build/*/called")).split()
        for called in checkout.glob("build/*/called"):
            called.unlink()
        named = dict(word.removeprefix("-DOCTAVO_").split("=") for word in told if word.startswith("-DOCTAVO_"))
        return {f"{name}={value}" for name, value in named.items()}  # of two values CMake takes the second

    assert options("runs", "extension") == {"ISAS=native"}
    assert not options("runs", "extension")
    assert options("tests", "install") == {"ISAS=tests"}
    assert not options("tests", "install")
    assert not options("tests", "extension")
    assert options("tests", "extension", ISAS="native") == {"ISAS=native"}
    assert options("tests", "install", CI="true") == {"ISAS=tests", "CUDA=NVCC"}
    assert options("tests", "cuda") == {"CUDA=ON"}


def make_checkout(root: Path, folder: Path) -> None:
    for name in ("Makefile", "tools/build_extension.sh", "pyproject.toml", "requirements/constraints.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / name)
    binaries = folder / ".venv/bin"
    binaries.mkdir(parents=True)
    (folder / "gpu_worker").mkdir()
    (binaries / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (binaries / "cmake").write_text(f"#!{sys.executable}{CMAKE}")
    for program in binaries.iterdir():
        program.chmod(0o755)
    for marker in (".installed-to-run", ".installed"):
        (folder / ".venv" / marker).touch()
