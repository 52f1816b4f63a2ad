"""One real process under test, and the faults that can happen to it. Every fault is verified: a test that only thinks
it killed something proves nothing."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from guard.processes import exists, state_of

from octavo.process.launcher import launched

TAIL_BYTES = 6000
SPAWNER = ThreadPoolExecutor(1)  # a child dies with the thread that started it, so that is one that stays


class Stoppable:
    """What has a name and a process id, and can be stopped for a while."""

    name: str
    pid: int

    def pause(self) -> None:
        """SIGSTOP; returns when every thread has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: state_of(self.pid) == "T", 10, f"{self.name} does not stop")

    def resume(self) -> None:
        assert state_of(self.pid) == "T", f"{self.name} was not stopped all the time"
        os.kill(self.pid, signal.SIGCONT)
        wait_until(lambda: state_of(self.pid) != "T", 10, f"{self.name} does not go on")


class Process(Stoppable):
    """A program that dies with the test run, however that ends; its output goes to `log`."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.name, self.log, self._command, self._cwd = name, log, list(command), cwd
        self.environment = environment  # None: that of this process
        self._popen: Any = None  # subprocess.Popen, or what has its methods

    @property
    def pid(self) -> int:
        assert self._popen is not None, f"{self.name} was not started"
        return int(self._popen.pid)

    @property
    def running(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Of a process that has ended; −n if signal n ended it."""
        return None if self._popen is None else self._popen.poll()

    def start(self) -> None:
        assert not self.running, f"{self.name} runs already"
        with self.log.open("ab") as log:
            self._popen = SPAWNER.submit(
                subprocess.Popen,
                launched(self._command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._cwd,
                env=self.environment,
                start_new_session=True,
            ).result()

    def kill(self) -> None:
        """SIGKILL; returns when the process is gone."""
        assert self.running, f"{self.name} had ended before it could be killed:\n{self.tail()}"
        pid = self.pid
        os.kill(pid, signal.SIGKILL)
        assert self._popen is not None
        assert self._popen.wait(60) == -signal.SIGKILL, f"{self.name} ended by itself"
        assert not exists(pid)

    def terminate(self, timeout_s: float = 60.0) -> float:
        """SIGTERM to a process that runs; returns when it has ended with status 0, and how many seconds it took."""
        assert self.running, f"{self.name} had ended before it could be asked to:\n{self.tail()}"
        began = time.monotonic()
        os.kill(self.pid, signal.SIGTERM)
        assert self._popen is not None
        code = self._popen.wait(timeout_s)
        assert code == 0, f"{self.name} ended with {code}:\n{self.tail()}"
        return time.monotonic() - began

    def stop(self, grace_s: float = 60.0) -> int:
        """SIGTERM; the exit code. Killed if it does not end in time."""
        if self._popen is None:
            return 0
        if self.running:
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGTERM)
        try:
            return self._popen.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()

    def tail(self) -> str:
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, f"{what} (waited {timeout_s:.0f} s)"
        time.sleep(0.04)
