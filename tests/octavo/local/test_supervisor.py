import asyncio
import os
import re
import signal
import sys
import time

import pytest
from guard.processes import exists
from waiting import until

from octavo.local.supervisor import StartError, SupervisedProcess, Supervisor
from octavo.process.child_process import ChildProcess, tail
from octavo.request.errors import StoreUnavailable


class Scripted:
    """A process whose lives and starts the test decides: each of `starts` is an error, or the exit code of a life."""

    name = "store"
    pid = 1

    def __init__(self, directory, *starts):
        self.log = directory / "log"
        self.starts = list(starts)
        self.num_starts = 0

    async def start(self):
        self.num_starts += 1
        if self.starts and isinstance(self.starts[0], Exception):
            raise self.starts.pop(0)

    async def wait(self):
        if not self.starts:
            await asyncio.Event().wait()
        return self.starts.pop(0)

    async def stop(self, grace_s):
        pass


SLEEP = "import time; time.sleep(3600)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); {SLEEP}"


def child_of(directory, code=SLEEP, name="worker-0"):
    return ChildProcess(name, [sys.executable, "-I", "-S", "-c", code], directory / name, {})


async def at_once():
    return True


async def never():
    return False


@pytest.fixture
def supervised():
    said, changes = [], []
    supervisor = Supervisor(said.append, lambda: changes.append(1))
    supervisor.said, supervisor.changes = said, changes
    return supervisor


async def test_a_killed_child_is_started_again(supervised, tmp_path):
    """In the end it is killed if it ignores SIGTERM."""
    child = child_of(tmp_path, STUBBORN)

    async def ready():
        return "up" in tail(child.log)

    await supervised.start([SupervisedProcess(child, ready)], 10)
    pids = [child.pid]
    for _ in range(2):
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: child.pid not in (None, pids[-1]))
        pids.append(child.pid)
    await until(lambda: any("ready again after" in text for text in supervised.said))
    before = len(supervised.changes)
    await supervised.stop(0.1)
    assert not any(map(exists, pids))
    assert child.pid is None
    assert len(supervised.changes) > before >= 5
    assert any("signal 9" in text for text in supervised.said)


async def test_a_child_that_ends_early_shows_its_log(supervised, tmp_path):
    code = "import sys; print('it begins\\n12:34:56.789 worker error   no such model\\n'); sys.exit(3)"
    (tmp_path / "worker-0").write_text("12:00:00.000 worker error   of an earlier run\n")
    child, other = child_of(tmp_path, code), child_of(tmp_path, name="worker-1")
    says = r"^worker-0 ended with code 3: no such model; the whole log is \S+$"
    with pytest.raises(StartError, match=says) as caught:
        await supervised.start([SupervisedProcess(child, never), SupervisedProcess(other, never)], 10)
    assert caught.value.log.splitlines() == ["it begins", "12:34:56.789 worker error   no such model"]
    await supervised.stop(5)
    assert other.pid is None


async def test_a_child_that_cannot_start_or_never_serves_is_given_up(supervised, tmp_path):
    (tmp_path / "logs").write_text("a file")
    for folder, ready, says in (
        (tmp_path / "logs", at_once, r"^worker-0 cannot start: \S+/logs: .*choose another with --state-dir$"),
        (tmp_path, never, "not ready"),
    ):
        with pytest.raises(StartError, match=says):
            await supervised.start([SupervisedProcess(child_of(folder), ready)], 0.2)
        await supervised.stop(5)


async def test_users_end_together_and_before_what_they_use(supervised, tmp_path):
    ends, both = [], asyncio.Barrier(2)

    def recorded(name):
        child = child_of(tmp_path, name=name)
        stop = child.stop

        async def recording(grace_s):
            await stop(grace_s)
            ends.append(name)
            if name != "store":
                await both.wait()  # where one waited for its turn, neither would end

        child.stop = recording
        return SupervisedProcess(child, at_once)

    await supervised.start([recorded("store")], 10)
    await supervised.start([recorded("router-0"), recorded("worker-0")], 10)
    async with asyncio.timeout(30):
        await supervised.stop(5)
    assert sorted(ends[:2]) == ["router-0", "worker-0"]
    assert ends[2:] == ["store"]


async def test_late_children_are_told_with_their_error(supervised, tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.local.supervisor.WORD_S", 0.05)
    code = f"print('12:34:56.789 router error   no tokenizer', flush=True); {SLEEP}"

    async def ready():
        return any("no tokenizer" in text for text in supervised.said)

    await supervised.start([SupervisedProcess(child_of(tmp_path, code, "router-0"), ready)], 10)
    await supervised.stop(5)
    assert re.search(r"^router-0: not ready yet after \d+ s; no tokenizer; see \S+$", "\n".join(supervised.said), re.M)


async def test_memory_is_blamed_if_the_kernel_has_killed_for_it(tmp_path, monkeypatch):
    counted = iter([0, 1, 1, 2])  # at first; then it kills this one, nobody, and somebody else
    monkeypatch.setattr("octavo.local.supervisor.oom_kills", lambda: next(counted, 2))
    said = []
    supervisor = Supervisor(said.append, lambda: None)
    process = Scripted(tmp_path, -signal.SIGKILL, -signal.SIGKILL, -signal.SIGTERM)
    await supervisor.start([SupervisedProcess(process, at_once)], 10)
    await until(lambda: process.num_starts == 4)
    await supervisor.stop(0)
    assert ["memory" in text for text in said if "ended" in text] == [True, False, False]


async def test_the_last_reason_is_told_and_counted(supervised, tmp_path):
    process = Scripted(tmp_path, -signal.SIGKILL, StoreUnavailable("no such server"), 3)
    await supervised.start([SupervisedProcess(process, at_once)], 10)
    await until(lambda: process.num_starts == 4)
    history = supervised.exits_of("store")
    assert (history.count, history.last_reason) == (3, "code 3")
    assert time.time() - history.last_at < 60
    await supervised.stop(0)
    told = [text for text in supervised.said if "ended" in text]
    assert [re.sub(r" in \S+ s$", "", text) for text in told] == [
        "store: ended (signal 9 SIGKILL); starting again",
        "store: ended (it cannot start: no such server, 2 times so far); starting again",
        "store: ended (code 3, 3 times so far); starting again",
    ]
