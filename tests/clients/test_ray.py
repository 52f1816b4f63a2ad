"""Ray's own package, unchanged, in an environment of its own, starts the other host of a group."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from client_programs import INSTALL_S, INSTALLED
from folder_llama import folder_llama

RAY = "ray==2.60.0"
LANGUAGES = os.environ.get("OCTAVO_TEST_CLIENTS", "").split()
pytestmark = pytest.mark.skipif(bool(LANGUAGES) and "ray" not in LANGUAGES, reason="ray is not chosen (CLIENTS=ray)")
PROGRAM = Path(__file__).with_name("ray") / "two_hosts.py"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def packages() -> Path:
    """Where Ray is. Its packages come after octavo's own."""
    folder = INSTALLED / RAY
    if not (folder / "ray").exists():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), RAY]
        subprocess.run(install, check=True, timeout=INSTALL_S)
    return folder


@pytest.mark.timeout(1200)
def test_an_actor_is_a_host_of_the_group(packages: Path, tmp_path: Path) -> None:
    model = folder_llama(tmp_path / "model")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests' / 'support'}:{packages}",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
    }
    program = [sys.executable, str(PROGRAM), str(model)]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {"same": True, "gone": True}
