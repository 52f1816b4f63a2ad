"""The simulation finds classic bugs. One that it no longer finds has lost a fault or a check."""

import subprocess
import sys
from pathlib import Path

import pytest

# Found within the first seeds.
QUICK = ("take_without_epoch", "forget_detach", "deliver_twice", "overlook_pictures", "buddy_goes_on")
LONGER = pytest.param(("send_before_journal",), marks=pytest.mark.long)
LATE = (
    "append_without_fence",
    "detach_everybody",
    "no_sweep",
    "claims_never_end",
    "requeue_nothing",
    "ignore_cancel",
)
NUM_SEEDS = 1000  # some need two routers at a stream at the right moment, which one of 150 clusters has


def simulate(root: Path, bugs: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simulation", "--seeds", str(NUM_SEEDS), "--bug", *bugs]
    support = root / "tests/support"
    return subprocess.run(command, env={"PYTHONPATH": f"{root}:{support}"}, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "bugs", [QUICK, LONGER, *(pytest.param((bug,), marks=pytest.mark.night) for bug in LATE)], ids=" ".join
)
def test_seeded_bugs_are_found(root: Path, bugs: tuple[str, ...]) -> None:
    run = simulate(root, bugs)
    assert run.returncode == 1, f"{NUM_SEEDS} seeds have not found one\n{run.stdout[-2000:]}\n{run.stderr}"
    assert run.stdout.count("repeat it with") >= len(bugs)
