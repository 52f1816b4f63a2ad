import ast
import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.process import failpoints
from octavo.request.errors import StoreUnavailable

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _a_place(monkeypatch):
    monkeypatch.setitem(failpoints.NAMES, "test.here", "a place of this test")
    yield
    failpoints.disarm_all()


async def test_what_is_armed_happens_as_often_as_asked():
    armed = failpoints.arm("test.here", "error:2")
    for _ in range(2):
        with pytest.raises(StoreUnavailable, match=r"test\.here"):
            await failpoints.reach("test.here")
    await failpoints.reach("test.here")
    assert armed.num_reached == 3
    assert armed.reached.is_set()

    called = asyncio.Event()

    async def action():
        called.set()

    failpoints.arm("test.here", action)
    await failpoints.reach("test.here")
    assert called.is_set()
    with pytest.raises(ValueError, match="no such failpoint"):
        failpoints.arm("nowhere", action)


@pytest.mark.parametrize("what", ["hang", "delay:0.2"])
async def test_what_hangs_goes_on_when_it_is_disarmed_or_late(what):
    armed = failpoints.arm("test.here", what)
    hanging = asyncio.create_task(failpoints.reach("test.here"))
    await armed.reached.wait()
    await asyncio.sleep(0)
    assert not hanging.done()
    if what == "hang":
        failpoints.disarm_all()
    await asyncio.wait_for(hanging, 10)


def test_kill_ends_the_process():
    script = """
import asyncio
from octavo.process import failpoints
failpoints.NAMES["a.b"] = ""
failpoints.arm_all(["a.b=kill"])
asyncio.run(failpoints.reach("a.b"))
print("alive")
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (-9, b"")


@pytest.mark.parametrize(
    "text",
    ["nowhere=kill", "test.here", "test.here=", "test.here=error:0", "test.here=delay", "test.here=delay:x", "=kill"],
)
def test_what_cannot_be_armed_is_refused(text):
    for refuse in (failpoints.require_texts, failpoints.arm_all):
        with pytest.raises(ValueError, match=r"must be kill|no such failpoint"):
            refuse([text])


def test_every_failpoint_is_reached_at_one_place():
    found = []
    for path in (path for package in ("octavo", "router", "gpu_worker") for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoints.reach":
                found.append(ast.literal_eval(node.args[0]))
    assert sorted(found) == sorted(set(failpoints.NAMES) - {"test.here"})
