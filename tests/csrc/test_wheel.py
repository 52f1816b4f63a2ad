"""What is shipped: a source distribution that can be built, and a wheel without the extension that says so."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

PACKAGES = ("octavo", "octavo_bench", "router", "gpu_worker")
START = """
import importlib.machinery, logging, sys, torch
sys.path.insert(0, sys.argv[1])
sys.meta_path.insert(0, importlib.machinery.PathFinder)  # before the hook of an editable install
logging.basicConfig()
from gpu_worker import ops
from octavo.cli.doctor import native_checks
assert ops.__file__.startswith(sys.argv[1]), ops.__file__
print(ops.choose_ops(torch.device("cpu")).name, "|", native_checks.cpu_extension(None).detail)
"""


def build(root: Path, hook: str, directory: Path, **settings: str) -> Path:
    """Builds as pip calls scikit-build-core, with the tools that are here."""
    code = f"from scikit_build_core.build import {hook}; print('made', {hook}({str(directory)!r}, {settings!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / done.stdout.rsplit("made ", 1)[1].strip()


@pytest.fixture
def tracked(root: Path) -> set[str]:
    done = subprocess.run(["git", "ls-files", *PACKAGES], cwd=root, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines())


def test_a_source_distribution_has_what_it_takes_to_build(root: Path, tmp_path: Path, tracked: set[str]) -> None:
    with tarfile.open(build(root, "build_sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    needed = {"pyproject.toml", "LICENSE", "docs/package.md", "csrc/CMakeLists.txt", "csrc/cuda/CMakeLists.txt"}
    ends = ("*.cpp", "*.h", "*.inl", "*.cu", "*.cuh")
    needed |= {str(path.relative_to(root)) for end in ends for path in root.glob(f"csrc/**/{end}")}
    assert needed | tracked <= names
    assert not [name for name in names if name.endswith((".so", ".png", ".jpg"))]
    assert not [name for name in names if name.startswith((".", "build/", "docs/measurements"))]
    top = {name.partition("/")[0] for name in names} - {*PACKAGES, "csrc", "protos", "docs"}
    assert top <= {"pyproject.toml", "LICENSE", "PKG-INFO", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", ""}


@pytest.mark.long
def test_a_wheel_without_the_extension_runs_on_the_reference_and_says_so(
    root: Path, tmp_path: Path, tracked: set[str]
) -> None:
    wheel = build(root, "build_wheel", tmp_path, **{"wheel.cmake": "false"})
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "site")
    data = {path for path in tracked if not path.endswith((".py", "README.md"))}
    assert data and data <= names  # pages, functions of the store, marks of types
    assert not [name for name in names if name.endswith(".so")]
    command = [sys.executable, "-c", START, str(tmp_path / "site")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("reference") and "not built" in done.stdout
    assert "running on the reference ops" in done.stderr
