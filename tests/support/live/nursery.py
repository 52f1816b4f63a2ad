"""Routers and workers that begin within a moment, because a process that has imported everything forks them.

A program needs most of a second to import what it is made of, and a test run starts hundreds. `python -m live.nursery`
reads a line of JSON for each and answers with the id of its process, an orphan that this process adopts (`guard.hooks`)
and so learns how it ends. What `python -m router` does by itself, the tests of `octavo up` show.
"""

import ctypes
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from runpy import run_module

from guard.processes import forever
from live.process import SPAWNER, Process, wait_until

from octavo.process.launcher import PR_SET_PDEATHSIG

SUPPORT = Path(__file__).resolve().parents[1]
MODULES = (
    "octavo.process.loop",
    "octavo.process.telemetry",
    "octavo.settings.exposure",
    "octavo.settings.loading",
    "router.program",
    "gpu_worker.serving.process.program",
)


class Child:
    """What has been forked, with the methods of subprocess.Popen that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self._code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return self._code

    def wait(self, timeout_s: float = 60.0) -> int:
        try:
            wait_until(lambda: self.poll() is not None, timeout_s, f"process {self.pid} lives on")
        except AssertionError as error:
            raise subprocess.TimeoutExpired(str(self.pid), timeout_s) from error
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """The process that forks. It ends with this one."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "live.nursery"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
        self._lock = threading.Lock()
        self._popen = SPAWNER.submit(
            subprocess.Popen, command, env=environment, cwd=SUPPORT.parent.parent, **pipes
        ).result()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def begin(self, command: Sequence[str], log: Path, folder: Path) -> Child:
        """The process of a command that begins as `python -m module`."""
        _, _, module, *arguments = command
        with self._lock:
            assert self._popen.stdin is not None and self._popen.stdout is not None
            asked = [os.getpid(), module, arguments, str(log), str(folder), dict(os.environ)]
            self._popen.stdin.write(json.dumps(asked) + "\n")
            self._popen.stdin.flush()
            return Child(int(self._popen.stdout.readline()))


@functools.cache
def nursery() -> Nursery:
    """Of this test run."""
    made = Nursery()
    forever([made.pid])
    return made


class NurseryProcess(Process):
    """One of its programs."""

    def start(self) -> None:
        assert not self.running, f"{self.name} runs already"
        self._popen = nursery().begin(self._command, self.log, self._cwd)


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for module in MODULES:
        import_module(module)
    gc.freeze()  # so that no collection in a child touches, and copies, what they share
    for line in sys.stdin:
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if program := os.fork():
                os.write(writer, str(program).encode())
                os._exit(0)
            _wait_for_adoption(between)
            _become(*json.loads(line))
            return
        os.waitpid(between, 0)  # from here on the program is an orphan
        print(os.read(reader, 32).decode(), flush=True)
        os.close(reader)
        os.close(writer)


def _wait_for_adoption(between: int) -> None:
    while os.getppid() == between:
        time.sleep(0.0005)


def _become(parent: int, module: str, arguments: list[str], log: str, folder: str, environment: dict[str, str]) -> None:
    """Turns this process into the program, which dies with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("nobody has adopted this process: tests/support/guard/hooks.py does")
    os.setsid()
    os.chdir(folder)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
