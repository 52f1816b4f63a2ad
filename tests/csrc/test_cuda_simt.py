"""The CUDA kernels' sources on a CPU, under AddressSanitizer: the cases of simt_cases/ in processes of their own.

`make test` runs few of them, and none where nobody has built the simulator, which takes minutes. `make simulator`
does, and so does `make test-long`; from then on `make test` compiles what has changed, and tests it.
"""

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import sanitized
from effort import draws, is_long
from simt_case_counts import BATCHES, usual

SCRIPT = Path(__file__).with_name("simt_cases")
SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.fixture(scope="session")
def simulator() -> Path:
    """The folder of _C_cuda_simt."""
    if platform.machine() not in ("x86_64", "AMD64") or not sys.platform.startswith("linux"):
        pytest.skip("the simulator changes stacks as x86-64 Linux does")
    if not (is_long() or list(sanitized.folder("cuda-simt").glob("_C_cuda_simt*.so"))):
        pytest.skip("the simulator is not built: make simulator")
    try:
        return sanitized.simulator()
    except sanitized.CannotBuild as error:
        pytest.skip(f"cannot build the simulator: {error}")


@pytest.mark.slow
@pytest.mark.scaled
@pytest.mark.timeout(1800)  # the first of them builds
@pytest.mark.parametrize("batch", BATCHES)
def test_kernels_agree_with_float64(simulator: Path, batch: str) -> None:
    run_cases(simulator, {group: draws(usual(count), count) for group, count in BATCHES[batch].items()})


def run_cases(simulator: Path, counts: dict[str, int]) -> None:
    command = [sys.executable, SCRIPT, "0", *(f"{group}={count}" for group, count in counts.items())]
    done = subprocess.run(command, capture_output=True, text=True, env=sanitized.environment(simulator, SUPPORT))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
