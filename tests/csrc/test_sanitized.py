"""Tests of this folder again, with a _C_cpu that was built with AddressSanitizer and UBSan."""

import subprocess
import sys
from pathlib import Path

import pytest
import sanitized

HERE = Path(__file__).parent
FILES = ("argument_fuzz", "arguments", "attention", "blocks", "linear", "rows", "sample")
TOO_LONG = """
import sys, torch, gpu_worker
gpu_worker.__path__.insert(0, sys.argv[1])
from gpu_worker import _C_cpu

class Claims(torch.Tensor):
    shape, stride = (1, 64), lambda self: (64, 1)

x = torch.ones(1, 32).as_subclass(Claims)
_C_cpu.rms_norm(torch.empty(1, 64), x, torch.ones(64), 1e-5)
"""


@pytest.mark.slow
@pytest.mark.scaled
@pytest.mark.long
@pytest.mark.timeout(900)  # builds
def test_ops_touch_only_what_is_theirs() -> None:
    """And a wrong access would be seen: of a tensor that claims more memory than it has."""
    try:
        folder = str(sanitized.cpu_extension())
    except sanitized.CannotBuild as error:
        pytest.skip(f"cannot build the extension with sanitizers: {error}")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        environment = sanitized.environment() | {"OCTAVO_TEST_EXTENSION": folder, "CI": "true"}
        return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=HERE)

    done = run("-c", TOO_LONG, folder)
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr, done.stdout + done.stderr
    done = run("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(f"test_{name}.py" for name in FILES))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
