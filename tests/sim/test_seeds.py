"""Simulated clusters: what every seed must show, and that a seed always shows the same."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from effort import draws

ROOT = Path(__file__).resolve().parents[2]


def simulate(seeds: str, *, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support"), "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-m", "simulation", "--seeds", seeds]
    return subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.scaled
@pytest.mark.timeout(900)
def test_every_stream_ends_right() -> None:
    run = simulate(str(draws(6, 500)))
    assert run.returncode == 0, f"{run.stdout}\n{run.stderr}"


@pytest.mark.slow
def test_a_seed_replays_identically() -> None:
    first, second = (simulate("1", hash_seed=hash_seed) for hash_seed in ("1", "2"))
    assert first.returncode == 0, first.stdout
    assert first.stdout == second.stdout
