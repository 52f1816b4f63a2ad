"""A process beside pytest that ends a test which its own time limit cannot end.

The time limit of pytest-timeout is an exception in pytest's main thread. It does not end a test that then waits for a
child process, or that is inside a C function. So a second process knows when a test is overdue, and does two things:
it kills the processes that the test has started, and where that does not help, it ends pytest with the stacks of all
threads. This is a process and not a thread, because what hangs may hold the interpreter's lock.
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from guard.processes import command_of, descendants, exists

ABORT_S = 5.0  # how long faulthandler may take to write the stacks
READ_BYTES = 65536


class Watchdog:
    """Pytest's side: says which test runs, and when it is overdue."""

    def __init__(self, kill_after_s: float, end_after_s: float, stderr: int) -> None:
        self._kill_after_s = kill_after_s
        command = [sys.executable, "-s", "-S", "-m", "guard.watchdog", str(os.getpid()), str(end_after_s)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            cwd="/",
            env={"PYTHONPATH": str(Path(__file__).resolve().parents[1])},
        )

    def begin(self, name: str, limit_s: float, spared: Iterable[int]) -> None:
        """From now on `name` runs, with this time limit. The processes in `spared` belong to others."""
        self._tell({"name": name, "overdue": time.monotonic() + limit_s + self._kill_after_s, "spared": [*spared]})

    def end(self) -> None:
        """Nothing runs that has a limit."""
        self._tell(None)

    def _tell(self, watched: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(watched).encode() + b"\n")
        self._process.stdin.flush()


class WatchdogProcess:
    """The watchdog's side. It ends when pytest closes the pipe, or is gone."""

    def __init__(self, pytest_pid: int, end_after_s: float) -> None:
        self._pytest_pid = pytest_pid
        self._end_after_s = end_after_s
        self._name = ""
        self._spared: Collection[int] = ()
        self._due: float | None = None
        self._has_killed = False

    def run(self) -> None:
        unread = b""
        while True:
            timeout = None if self._due is None else max(0.0, self._due - time.monotonic())
            if select.select([0], [], [], timeout)[0]:
                data = os.read(0, READ_BYTES)
                if not data:
                    return
                *lines, unread = (unread + data).split(b"\n")
                if lines:
                    self._note(json.loads(lines[-1]))
            elif self._has_killed:
                self._end_pytest()
                return
            else:
                self._kill_started()

    def _note(self, watched: dict[str, object] | None) -> None:
        self._has_killed = False
        self._due = None
        if watched is not None:
            self._name, self._spared, self._due = watched["name"], watched["spared"], watched["overdue"]

    def _kill_started(self) -> None:
        """Whoever waits for one of these processes goes on."""
        killed = [f"{pid} {command_of(pid)}" for pid in self._started() if exists(pid)]
        say(f"{self._name} is overdue; killing what it has started: {'; '.join(killed) or 'nothing runs'}")
        kill(self._started())
        self._has_killed = True
        self._due = time.monotonic() + self._end_after_s

    def _end_pytest(self) -> None:
        say(f"{self._name} does not end; its time limit is long over. The test run ends here, with these stacks:")
        below = self._started(spared=())
        os.kill(self._pytest_pid, signal.SIGABRT)  # faulthandler writes the stacks, then the process is gone
        until = time.monotonic() + ABORT_S
        while exists(self._pytest_pid) and time.monotonic() < until:
            time.sleep(0.05)
        kill([self._pytest_pid, *below])

    def _started(self, spared: Collection[int] | None = None) -> list[int]:
        spared = self._spared if spared is None else spared
        return [pid for pid in descendants(self._pytest_pid) if pid != os.getpid() and pid not in spared]


def kill(pids: Iterable[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def say(message: str) -> None:
    print(f"\nwatchdog: {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which closes the pipe when it ends
    WatchdogProcess(int(sys.argv[1]), float(sys.argv[2])).run()
