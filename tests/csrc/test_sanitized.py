"""Tests of this folder again, with a _C_cpu that was built with AddressSanitizer and UBSan."""

import subprocess
import sys
from pathlib import Path

import pytest
import sanitized

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
FILES = ("argument_fuzz", "arguments", "attention", "blocks", "linear", "ref", "rows", "sample")


@pytest.fixture(scope="module")
def extension_folder() -> Path:
    try:
        return sanitized.cpu_extension()
    except sanitized.CannotBuild as error:
        pytest.skip(f"cannot build the extension with sanitizers: {error}")


def run(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = sanitized.environment() | {"OCTAVO_TEST_EXTENSION": str(folder), "CI": "true"}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=HERE)


@pytest.mark.slow
@pytest.mark.scaled
@pytest.mark.timeout(900)  # builds
def test_ops_touch_only_what_is_theirs(extension_folder: Path) -> None:
    files = [f"test_{name}.py" for name in FILES]
    done = run(extension_folder, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


TOO_LONG = """
import torch
from gpu_worker import _C_cpu

class Claims(torch.Tensor):
    shape, stride = (1, 64), lambda self: (64, 1)

x = torch.ones(1, 32).as_subclass(Claims)
_C_cpu.rms_norm(torch.empty(1, 64), x, torch.ones(64), 1e-5)
"""


@pytest.mark.slow
def test_a_wrong_access_would_be_seen(extension_folder: Path) -> None:
    """An op gets a tensor that claims more memory than it has."""
    done = run(
        extension_folder, "-c", f"import gpu_worker; gpu_worker.__path__.insert(0, {str(extension_folder)!r}){TOO_LONG}"
    )
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stdout + done.stderr
