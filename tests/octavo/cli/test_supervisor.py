import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from octavo.cli.child import Child, tail, trim_log
from octavo.cli.supervisor import Service, StartError, Supervisor

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


async def test_a_killed_child_is_started_again_until_the_end(supervised, tmp_path):
    child = Child("worker-0", SLEEP, tmp_path / "log", {})
    await supervised.start([Service(child, at_once)], 10)
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


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace_time(supervised, tmp_path):
    child = Child("worker-0", [sys.executable, "-I", "-S", "-c", STUBBORN], tmp_path / "log", {})

    async def ready():
        return "up" in tail(child.log)

    await supervised.start([Service(child, ready)], 10)
    pid = child.pid
    await supervised.stop(0.1)
    assert not alive(pid)


async def test_a_child_that_ends_before_it_serves_shows_its_log(supervised, tmp_path):
    code = "import sys; print('no such model'); sys.exit(3)"
    child = Child("worker-0", [sys.executable, "-I", "-S", "-c", code], tmp_path / "log", {})
    other = Child("worker-1", SLEEP, tmp_path / "other", {})

    async def never():
        return False

    with pytest.raises(StartError, match=r"worker-0 ended with code 3(.|\n)*no such model"):
        await supervised.start([Service(child, never), Service(other, never)], 10)
    await supervised.stop(5)
    assert other.pid is None


async def test_a_child_that_never_serves_is_given_up(supervised, tmp_path):
    async def never():
        return False

    with pytest.raises(StartError, match="not ready"):
        await supervised.start([Service(Child("router-0", SLEEP, tmp_path / "log", {}), never)], 0.2)
    await supervised.stop(5)


async def test_users_end_before_what_they_use(supervised, tmp_path):
    ends = []

    class Recorded(Child):
        async def stop(self, grace_s):
            ends.append(self.name)
            await super().stop(grace_s)

    for name in ("store", "router-0", "worker-0"):
        await supervised.start([Service(Recorded(name, SLEEP, tmp_path / name, {}), at_once)], 10)
    await supervised.stop(5)
    assert ends == ["worker-0", "router-0", "store"]


async def test_environment_goes_to_the_child_and_not_through_argv(tmp_path):
    code = "import os, sys; print(os.environ['SECRET'], sys.stdin.read() == '')"
    child = Child("worker-0", [sys.executable, "-I", "-S", "-c", code], tmp_path / "log", {"SECRET": "a=b c"})
    await child.start()
    assert await child.wait() == 0
    assert tail(child.log) == "a=b c True"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
async def test_children_die_with_a_supervisor_that_is_killed(tmp_path):
    program = f"""
import asyncio, sys
from pathlib import Path
from octavo.cli.child import Child
async def main():
    children = [Child(f"worker-{{i}}", {SLEEP!r}, Path({str(tmp_path)!r}) / f"{{i}}", {{}}) for i in range(3)]
    for child in children:
        await child.start()
    print(*(child.pid for child in children), flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
"""
    supervisor = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=subprocess.PIPE)
    pids = list(map(int, (await supervisor.stdout.readline()).split()))
    assert len(pids) == 3
    assert all(map(alive, pids))
    supervisor.kill()
    await supervisor.wait()
    await until(lambda: not any(map(alive, pids)), "the children to die")


def test_a_log_is_bounded_while_its_writer_appends(tmp_path):
    log = tmp_path / "log"
    with log.open("ab", buffering=0) as writer:
        writer.write(b"x" * 1000)
        trim_log(log, 2000)
        assert log.stat().st_size == 1000
        trim_log(log, 500)
        writer.write(b"new")
    assert log.read_bytes() == b"new"
    assert (tmp_path / "log.1").stat().st_size == 500
