"""Routers and workers that begin within a moment, because a process that has imported everything forks them.

A program needs a second or two to import what it is made of, and a test run starts hundreds. `python -m live.nursery`
reads a message of JSON for each, with descriptors for it, and answers with the id of its process, an orphan that this
process adopts (`guard.hooks`) and so learns how it ends. A group from here has a nursery of its own, a fork, for its
ranks. What `python -m router` does by itself, the tests of `octavo up` show, and those of groups that cannot start
what a rank does.
"""

import ctypes
import fcntl
import functools
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from runpy import run_module
from typing import IO, Any

import xdist_forks
from guard.processes import PR_SET_CHILD_SUBREAPER, forever
from live.process import SPAWNER, Process, wait_until

from gpu_worker.group.rank_process import RankProcess
from octavo.process.launcher import PR_SET_PDEATHSIG

SUPPORT = Path(__file__).resolve().parents[1]
RANKS_START = ("gpu_worker.group.loading", "gpu_worker.group.device_group", "gpu_worker.group.hosts.follower")
MODULES = (
    "octavo.process.loop",
    "octavo.process.telemetry",
    "octavo.settings.exposure",
    "octavo.settings.loading",
    "router.program",
    "gpu_worker.serving.process.program",
    "gpu_worker.group.rank_service",
    *RANKS_START,
)
MOST_BYTES, MOST_DESCRIPTORS, HIGH = 1 << 17, 250, 512  # of a message; descriptors from HIGH on are nobody's
PR_SET_NAME = 15
GROUP_FLAGS = {"--tensor-parallel", "--pipeline-parallel", "--launcher"}


class Child:
    """What has been forked, with the methods of subprocess.Popen that are used."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin: IO[Any] | None = None
        self.stdout: IO[Any] | None = None
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

    def close(self) -> None:
        for stream in (self.stdin, self.stdout):
            if stream is not None:
                stream.close()


class Nursery:
    """The process that forks, at the other end of this socket."""

    def __init__(self, asked: socket.socket, process: object = None) -> None:
        self._socket = asked
        self._process = process  # kept: a Popen warns where nobody holds it while its process runs
        self._lock = threading.Lock()

    def begin(self, command: Sequence[str], log: Path, folder: Path, given: Mapping[int, int] | None = None) -> Child:
        """The process of a command: nsenter into a network and env, if so, and `python -m module`.

        `given`: what its descriptors are here.
        """
        network, environment, there = "", dict(os.environ), dict(given or {})
        if command[0].endswith("nsenter"):
            network, command = command[1].removeprefix("--net="), command[3:]
        if command[0].endswith("env"):
            command = command[1:]
            while "=" in command[0]:
                name, _, environment[name] = command[0].partition("=")
                command = command[1:]
        _, _, module, *arguments = command
        with self._lock:
            asked = [os.getpid(), module, arguments, str(log), str(folder), network, environment, list(there)]
            socket.send_fds(self._socket, [json.dumps(asked).encode()], list(there.values()))
            return Child(int(self._socket.recv(32)))


@functools.cache
def nursery() -> Nursery:
    """Of this test run. A worker of pytest-xdist has one from its start."""
    if xdist_forks.nursery_of_this_worker is not None:
        asked, pid = xdist_forks.nursery_of_this_worker
        forever([pid])
        return Nursery(asked)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        started = SPAWNER.submit(
            subprocess.Popen,
            [sys.executable, "-m", "live.nursery"],
            stdin=theirs,
            env={**os.environ, "PYTHONPATH": str(SUPPORT)},
            cwd=SUPPORT.parent.parent,
        ).result()
    forever([started.pid])
    return Nursery(ours, started)


class NurseryProcess(Process):
    """One of its programs."""

    def start(self) -> None:
        assert not self.running, f"{self.name} runs already"
        self._popen = nursery().begin(self._command, self.log, self._cwd)


class NurseryRank(RankProcess):
    """A rank of a group from there."""

    def start(self) -> None:
        reader, writer = os.pipe()
        command = [sys.executable, "-m", "gpu_worker.group.rank", self._task.to_json()]
        given = {1: writer, **{number: number for number in self._task.descriptors}}
        child = nursery().begin(command, Path(os.devnull), Path.cwd(), given)
        os.close(writer)
        child.stdout = os.fdopen(reader, "rb")
        self._process = child  # type: ignore[assignment]  # a Popen in all that it uses


def main(asking: socket.socket) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for module in MODULES:
        import_module(module)
    gc.freeze()  # so that no collection in a child touches, and copies, what they share
    _serve(asking)


def _serve(asking: socket.socket) -> None:
    """Until nobody asks any more. Returns in what was forked, too, when its program has ended."""
    while True:
        message, given, _, _ = socket.recv_fds(asking, MOST_BYTES, MOST_DESCRIPTORS)
        if not message:
            return
        reader, writer = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if program := os.fork():
                os.write(writer, str(program).encode())
                os._exit(0)
            _wait_for_adoption(between)
            _become(given, *json.loads(message))
            return
        os.waitpid(between, 0)  # from here on the program is an orphan
        os.close(writer)  # so that the read ends, if there was no second fork
        asking.send(os.read(reader, 32))
        for descriptor in (reader, *given):
            os.close(descriptor)


def _wait_for_adoption(between: int) -> None:
    while os.getppid() == between:
        time.sleep(0.0005)


def _become(
    given: Sequence[int],
    parent: int,
    module: str,
    arguments: list[str],
    log: str,
    folder: str,
    network: str,
    environment: dict[str, str],
    numbers: list[int],
) -> None:
    """Turns this process into the program, which dies with its parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("nobody has adopted this process: tests/support/guard/hooks.py does")
    os.setsid()
    os.chdir(folder)
    if network:
        namespace = os.open(network, os.O_RDONLY)
        if ctypes.CDLL(None).setns(namespace, 0):
            sys.exit(f"{network} cannot be entered")
        os.close(namespace)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, HIGH) for descriptor in given]
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(PR_SET_NAME, module[-15:].encode())  # by which `guard.processes` knows a rank
    if not GROUP_FLAGS.isdisjoint(arguments):
        _fork_its_ranks()
    sys.argv = [module, *arguments]
    run_module(module, run_name="__main__", alter_sys=True)


def _fork_its_ranks() -> None:
    """A process beside this one, which has no threads yet, forks the ranks that this one starts and adopts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    if os.fork() == 0:
        ours.close()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            _serve(theirs)
        sys.exit()
    theirs.close()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    of_ranks = import_module("live.nursery")  # this module is __main__
    of_ranks.nursery = functools.cache(lambda: Nursery(ours))
    for name in RANKS_START:
        import_module(name).RankProcess = of_ranks.NurseryRank


if __name__ == "__main__":
    main(socket.socket(fileno=os.dup(0)))
