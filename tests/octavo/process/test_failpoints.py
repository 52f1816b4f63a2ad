import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octavo.process import failpoints

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(autouse=True)
def _a_place(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(failpoints.NAMES, "test.here", "a place of this test")
    yield
    failpoints.disarm_all()


def test_kill_ends_the_process():
    script = """
import asyncio
from octavo import failpoints
failpoints.NAMES["a.b"] = ""
failpoints.arm_all(["a.b=kill"])
asyncio.run(failpoints.reach("a.b"))
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-9, b"")


def reached_names() -> list[str]:
    """The places that the packages reach, one for each call."""
    found = []
    for package in ("octavo", "router", "gpu_worker"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.reach":
                    found.append(ast.literal_eval(node.args[0]))
    return found


def test_every_failpoint_is_reached_at_one_place():
    names = set(failpoints.NAMES) - {"test.here"}
    assert sorted(reached_names()) == sorted(names)
