"""A child process gets what it is given and dies with its parent; its log stays bounded."""

import signal
import sys

import pytest
from guard.processes import exists

from octavo.process.child_process import ChildProcess, trim_log

SLEEP = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(3600)"]


async def test_children_are_killed_stopped_and_started_again(tmp_path):
    child = ChildProcess("worker-0", SLEEP, tmp_path / "logs" / "log")
    assert child.pid is None
    with pytest.raises(RuntimeError, match="worker-0 was not started"):
        await child.wait()
    await child.stop(1.0)
    for end, code in ((child.kill(), -signal.SIGKILL), (child.stop(10.0), -signal.SIGTERM)):
        await child.start()
        pid = child.pid
        assert exists(pid)
        await end
        assert (child.pid, await child.wait()) == (None, code)
        assert not exists(pid)
    await child.kill()


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
