import asyncio
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from octavo.local.supervisor import StartError, SupervisedProcess, Supervisor
from octavo.process.child_process import ChildProcess, tail

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"]
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(3600)"
)


async def until(condition, what, timeout_s=10.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"waited in vain for {what}"
        await asyncio.sleep(0.01)


def alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


async def at_once():
    return True


@pytest.fixture
def supervised():
    said, changes = [], []
    supervisor = Supervisor(said.append, lambda: changes.append(1))
    supervisor.said, supervisor.changes = said, changes
    return supervisor


async def test_a_killed_child_is_started_again(supervised, tmp_path):
    child = ChildProcess("worker-0", SLEEP, tmp_path / "log", {})
    await supervised.start([SupervisedProcess(child, at_once)], 10)
    pids = [child.pid]
    for _ in range(2):
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: child.pid not in (None, pids[-1]), "a new process")
        pids.append(child.pid)
    before = len(supervised.changes)
    await supervised.stop(5)
    assert not any(map(alive, pids))
    assert child.pid is None
    assert len(supervised.changes) > before >= 5
    assert any("signal 9" in text for text in supervised.said)


async def test_a_child_that_ignores_sigterm_is_killed(supervised, tmp_path):
    child = ChildProcess("worker-0", [sys.executable, "-I", "-S", "-c", STUBBORN], tmp_path / "log", {})

    async def ready():
        return "up" in tail(child.log)

    await supervised.start([SupervisedProcess(child, ready)], 10)
    pid = child.pid
    await supervised.stop(0.1)
    assert not alive(pid)


async def test_a_child_that_ends_early_shows_its_log(supervised, tmp_path):
    code = "import sys; print('it begins\\n12:34:56.789 worker error   no such model\\n'); sys.exit(3)"
    (tmp_path / "log").write_text("12:00:00.000 worker error   of an earlier run\n")
    child = ChildProcess("worker-0", [sys.executable, "-I", "-S", "-c", code], tmp_path / "log", {})
    other = ChildProcess("worker-1", SLEEP, tmp_path / "other", {})

    async def never():
        return False

    with pytest.raises(
        StartError, match=r"^worker-0 ended with code 3: no such model; the whole log is \S+$"
    ) as caught:
        await supervised.start([SupervisedProcess(child, never), SupervisedProcess(other, never)], 10)
    assert caught.value.log.splitlines() == ["it begins", "12:34:56.789 worker error   no such model"]
    await supervised.stop(5)
    assert other.pid is None


async def test_an_unwritable_log_is_named_by_its_path(supervised, tmp_path):
    (tmp_path / "logs").write_text("a file")
    child = ChildProcess("worker-0", SLEEP, tmp_path / "logs" / "log", {})
    with pytest.raises(StartError, match=r"^worker-0 cannot start: \S+/logs: .*choose another with --state-dir$"):
        await supervised.start([SupervisedProcess(child, at_once)], 10)
    await supervised.stop(5)


async def test_users_end_together_and_before_what_they_use(supervised, tmp_path):
    ends, both = [], asyncio.Barrier(2)

    class Recorded(ChildProcess):
        async def stop(self, grace_s):
            await super().stop(grace_s)
            ends.append(self.name)
            if self.name != "store":
                await both.wait()  # where one waited for its turn, neither would end

    def recorded(*names):
        return [SupervisedProcess(Recorded(name, SLEEP, tmp_path / name, {}), at_once) for name in names]

    await supervised.start(recorded("store"), 10)
    await supervised.start(recorded("router-0", "worker-0"), 10)
    async with asyncio.timeout(30):
        await supervised.stop(5)
    assert sorted(ends[:2]) == ["router-0", "worker-0"]
    assert ends[2:] == ["store"]
