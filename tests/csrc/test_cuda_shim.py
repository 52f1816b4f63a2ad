"""The CUDA kernels' sources on a CPU, under AddressSanitizer: the cases of shim/ in processes of their own."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized

SCRIPT = Path(__file__).with_name("shim")
SUPPORT = Path(__file__).resolve().parents[1] / "support"
CASES = {
    "decode_mma": 240,
    "decode_simt": 120,
    "prefill_mma": 80,
    "prefill_simt": 60,
    "vllm": 80,
    "merge": 200,
    "write": 300,
    "blocks": 100,
    "layout": 60,
    "convert": 100,
    "rows": 120,
    "sample": 150,
    "sampler": 20,
    "penalize": 60,
    "logprobs": 60,
    "refused": 5,
    "place": 2,
    "plan": 4,
    "swap": 60,
    "swapped": 2,
    "ops": 8,
    "graphs": 3,
    "invariant": 3,
    "compat": 6,
}


@pytest.fixture(scope="session")
def shim() -> Path:
    """The folder of _C_cuda_shim."""
    if platform.machine() not in ("x86_64", "AMD64") or not sys.platform.startswith("linux"):
        pytest.skip("the shim changes stacks as x86-64 Linux does")
    try:
        return sanitized.build("csrc/cuda/shim", "cuda-shim")
    except sanitized.CannotBuild as error:
        pytest.skip(f"cannot build the shim: {error}")


@pytest.mark.slow
@pytest.mark.timeout(900)  # the first of them builds
@pytest.mark.parametrize("group", CASES)
def test_kernels_agree_with_float64(shim: Path, group: str) -> None:
    command = [sys.executable, SCRIPT, group, str(CASES[group]), "0"]
    done = subprocess.run(command, capture_output=True, text=True, env=sanitized.environment(shim, SUPPORT))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
