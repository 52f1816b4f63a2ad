"""`make gpu-check` on the simulator: every stage runs, so no name is mistyped and no call has outdated arguments."""

import subprocess
import sys
from pathlib import Path

import pytest
import sanitized

pytestmark = pytest.mark.long

HERE = Path(__file__).resolve().parent


@pytest.mark.timeout(900)
def test_every_stage_runs(tmp_path: Path) -> None:
    try:
        environment = sanitized.environment(sanitized.simulator()) | {"OUT": str(tmp_path)}
    except sanitized.CannotBuild as error:
        pytest.skip(f"cannot build the simulator: {error}")
    command = [sys.executable, HERE / "check.py", "--rehearse"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    report = (tmp_path / "gpu-check.md").read_text()
    assert report.count("| passed |") == 14
    titles = (
        "Bandwidth",
        "Decode attention",
        "Prefill attention",
        "Swaps",
        "Blocks within",
        "Blocks by way of",
        "Ops on rows",
        "Logits: relative errors",
    )
    for title in (*titles, "Products with", "From logits", "A decode step", "Two ranks"):
        assert f"**{title}" in report


def test_a_stage_that_fails_is_told_and_the_others_run(tmp_path: Path) -> None:
    """Without a GPU and without the simulator nothing can pass."""
    command = [sys.executable, HERE / "check.py", "--only", "smoke,bandwidth"]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "", "OUT": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].startswith("smoke: FAILED (status 1)")
    assert done.stderr.splitlines()[1].startswith("bandwidth: FAILED (status 1)")
    assert (tmp_path / "gpu-check.md").read_text().count("torch sees no CUDA device") == 2
