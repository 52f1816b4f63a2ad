"""A short storm, with the faults in another order each time that the seed is another one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

JSON = ("--json-share", "0.8", "--kinds", "router-kill,worker-kill,move,move-wave")


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "workers",
    [
        pytest.param((), marks=pytest.mark.night, id="single"),
        pytest.param(("--groups",), marks=pytest.mark.night, id="groups"),
        pytest.param(JSON, marks=pytest.mark.long, id="json"),
    ],
)
def test_a_short_storm_breaks_no_promise(root: Path, tmp_path: Path, seed: int, workers: tuple[str, ...]) -> None:
    options = ["--minutes", "1.5", "--rate", "2", "--streams", "20", "--seed", str(seed), "--folder", str(tmp_path)]
    options += ["--workers", "3", "--routers", "2", *workers]
    done = subprocess.run(
        [sys.executable, str(root / "tests/chaos/storm_run.py"), *options],
        env={**os.environ, "PYTHONPATH": str(root / "tests/support")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-2_000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["faults"]["router-kill"] > 0
    assert report["faults"]["worker-kill"] > 0
    assert report["ends"]["own end"] > 20
    assert workers != JSON or report["inside_json"]["whole outputs, which are valid"] > 0
