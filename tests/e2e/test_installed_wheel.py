"""The wheel that `make wheel` makes, where a user has it: in a bare environment, without compiler and sources."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from live.process import Process, wait_until

from gpu_worker.models.checkpoint.locate import demo_file

pytestmark = [pytest.mark.night, pytest.mark.timeout(2400)]  # builds every instruction set, and installs torch

ROOT = Path(__file__).resolve().parents[2]
OFFLINE = """
import sys
from gpu_worker import LLM, SamplingParams
[result] = LLM(sys.argv[1]).generate(["Once upon a time"], SamplingParams(max_tokens=8, temperature=0))
print(len(result.outputs[0].token_ids))
"""


def run(*command: object, **options: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """OCTAVO_TEST_WHEEL names one that was built before."""
    if "OCTAVO_TEST_WHEEL" in os.environ:
        return Path(os.environ["OCTAVO_TEST_WHEEL"]).resolve()
    if shutil.which("auditwheel", path=Path(sys.executable).parent) is None:
        pytest.skip("there is no auditwheel: pip install -r requirements/wheel.txt")
    folder = tmp_path_factory.mktemp("dist")
    said = run(ROOT / "tools/wheel.sh", folder, sys.executable)
    [made] = folder.glob("octavo-*.whl")
    assert "manylinux" in made.name and "manylinux" in said
    return made


class Installed:
    """An environment that has the wheel, and a PATH on which there is no compiler."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.bin, self.home = folder / "venv/bin", folder / "home"
        self.home.mkdir(parents=True)
        run(sys.executable, "-m", "venv", folder / "venv")
        self.environment = {"PATH": str(self.bin), "HOME": str(self.home), "LANG": "C.UTF-8"}
        constraints = ROOT / "requirements/constraints.txt"
        pip = [self.bin / "python", "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary", ":all:"]
        run(*pip, "--constraint", constraints, f"octavo[{extra}] @ file://{wheel}", env=os.environ | self.environment)

    def run(self, *command: object) -> str:
        return run(self.bin / str(command[0]), *command[1:], env=self.environment, cwd=self.home)


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Installed:
    return Installed(tmp_path_factory.mktemp("all"), wheel, "all")


def test_up_serves_from_a_wheel(everything: Installed, tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [str(everything.bin / "octavo"), "up", "--model", str(demo_file()), "--workers", "1", "--json"]
    command += ["--grpc-port", "0", "--state-dir", str(state)]
    process = Process("up", command, tmp_path / "up.log", everything.home, everything.environment)
    process.start()
    try:
        wait_until(lambda: '"ready": true' in process.log.read_text(), 300, process.tail())
        words = ("generate", "Once upon a time", "--max-tokens", "8", "--json", "--state-dir", state)
        assert "finish_reason" in everything.run("octavo", *words)
    finally:
        process.stop()


def test_the_offline_engine_runs_from_a_wheel(everything: Installed) -> None:
    assert everything.run("python", "-I", "-c", OFFLINE, demo_file()).split()[-1] == "8"


def test_doctor_gives_advice_that_fits_a_wheel(everything: Installed) -> None:
    command = [everything.bin / "octavo", "doctor", "--json"]
    options = {"env": everything.environment, "cwd": everything.home}
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert "make extension" not in done.stdout
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["extension"]["result"] == "ok", checks["extension"]


def test_a_router_from_a_wheel_has_no_torch(wheel: Path, tmp_path: Path) -> None:
    router = Installed(tmp_path, wheel, "router")
    listed = router.run("python", "-m", "pip", "list", "--format", "freeze").lower()
    assert "octavo==" in listed and "torch==" not in listed and "numpy==" not in listed
    assert "--store" in router.run("octavo", "router", "--help")
