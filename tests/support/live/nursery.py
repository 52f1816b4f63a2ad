"""Routers and workers that begin within a moment, because a process that has imported everything forks them.

A kill every two seconds outruns what a Python program needs to import. `python -m live.nursery` reads a line of JSON,
`[module, arguments, log, folder]`, for each program, and answers with the id of its process.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from runpy import run_module

from guard.processes import exists, lasting
from live.cluster import ROOT, Cluster, Shape
from live.process import SPAWNER, Process, wait_until

from octavo.process.launcher import PR_SET_PDEATHSIG

END_S = 60.0


class Nursery:
    """The process that forks programs. They die with it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "live.nursery"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support")}
        self._lock = threading.Lock()
        self._popen = SPAWNER.submit(subprocess.Popen, command, env=environment, cwd=ROOT, **pipes).result()

    @property
    def pid(self) -> int:
        return self._popen.pid

    def begin(self, command: Sequence[str], log: Path, folder: Path) -> int:
        """The process of a command that begins as `python -m module`."""
        _, _, module, *arguments = command
        with self._lock:
            assert self._popen.stdin is not None and self._popen.stdout is not None
            self._popen.stdin.write(json.dumps([module, arguments, str(log), str(folder)]) + "\n")
            self._popen.stdin.flush()
            return int(self._popen.stdout.readline())

    def close(self) -> None:
        self._popen.kill()
        self._popen.communicate()


class NurseryProcess(Process):
    """One of its programs. Nobody but the nursery learns how it has ended."""

    def __init__(self, nursery: Nursery, name: str, command: Sequence[str], log: Path) -> None:
        super().__init__(name, command, log, ROOT)
        self._nursery = nursery
        self._pid = 0

    @property
    def pid(self) -> int:
        return self._pid

    @property
    def running(self) -> bool:
        return bool(self._pid) and exists(self._pid)

    @property
    def exit_code(self) -> int | None:
        return None if self.running else 0

    def start(self) -> None:
        assert not self.running, f"{self.name} runs already"
        self._pid = self._nursery.begin(self._command, self.log, self._cwd)

    def kill(self) -> None:
        assert self.running, f"{self.name} had ended before it could be killed:\n{self.tail()}"
        os.kill(self._pid, signal.SIGKILL)
        wait_until(lambda: not exists(self._pid), END_S, f"{self.name} lives on")

    def stop(self, grace_s: float = END_S) -> int:
        if self.running:
            os.kill(self._pid, signal.SIGTERM)
            until = time.monotonic() + grace_s
            while self.running and time.monotonic() < until:
                time.sleep(0.05)
        if self.running:
            self.kill()
            return 1
        return 0


class QuickCluster(Cluster):
    """A cluster whose routers and workers begin within a moment."""

    def __init__(self, directory: Path, shape: Shape) -> None:
        super().__init__(directory, shape)
        self._nursery = Nursery()

    def start(self) -> None:
        self.store.start()
        for name in [*(f"r{i}" for i in range(self.shape.routers)), *self.worker_endpoints]:
            process = NurseryProcess(self._nursery, name, self._command(name), self.directory / f"{name}.log")
            self.processes[name] = process
            process.start()
        self.wait_ready()

    def stop(self) -> dict[str, int]:
        codes = super().stop()
        self._nursery.close()
        return codes

    def pids(self) -> list[int]:
        return [*super().pids(), self._nursery.pid]


@contextmanager
def quick_cluster(directory: Path, shape: Shape) -> Iterator[QuickCluster]:
    """Such a cluster, from ready to gone."""
    cluster = QuickCluster(directory, shape)
    with lasting(cluster.pids):
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


def main() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for module in ("gpu_worker.serving.process.program", "router.program"):
        import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended leaves nothing behind
    for line in sys.stdin:
        module, arguments, log, folder = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(module, arguments, log, folder)
        print(child, flush=True)
    os._exit(0)


def _become(module: str, arguments: list[str], log: str, folder: str) -> None:
    """Turns this process into the program, which dies with its parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    os.chdir(folder)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = [module, *arguments]
    status = 1
    try:
        run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
