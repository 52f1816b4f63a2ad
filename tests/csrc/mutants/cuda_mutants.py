"""Classic bugs in the CUDA kernels and their planner, which the cases of simt_cases/ must see.

Where a kernel is compiled for several types, one of them is enough: the cases reach it often.
"""

import subprocess
import sys
from pathlib import Path

import sanitized
from mutant import Build, Suite, read
from simt_case_counts import CASES

SCRIPT = Path(__file__).resolve().parents[1] / "simt_cases"


def first_failure(folder: Path, group: str) -> str | None:
    command = [sys.executable, SCRIPT, "0", f"{group}={CASES[group]}"]
    done = subprocess.run(command, capture_output=True, text=True, env=sanitized.environment(folder))
    if done.returncode == 0:
        return None
    what = [line for line in done.stderr.splitlines() if "Error" in line or "simt:" in line or "ERROR" in line]
    return f"{group}: {what[-1][:80] if what else f'ended with {done.returncode}'}"


CUDA = Suite(read("cuda"), lambda: Build(sanitized.simulator(), "_C_cuda_simt"), first_failure)
