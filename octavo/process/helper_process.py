"""Has work done in a process of its own, so that no request can take the time or memory of this one.

What goes over a limit ends its process, and the next request has another one. `octavo.process.helper_loop` is the other
end.
"""

import atexit
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from octavo.process import helper_loop
from octavo.process.helper_loop import ANSWER, HEAD
from octavo.request.errors import Unreachable

MAX_IDLE = 2  # processes that wait for work
TRIES = 3  # a process that waited may have been ended by somebody else
MIB = 1 << 20
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_ROOT = Path(__file__).parents[2]


class HelperRefusal(Exception):
    """The process has answered that it does not do this. The message says why."""


class TooCostly(HelperRefusal):
    """The request takes too much time or memory, or has too long an answer."""


class HelperEnded(Exception):
    """The process has ended, and the request is not the cause."""


@dataclass(frozen=True, slots=True)
class HelperLimits:
    """What one request may cost."""

    seconds: float  # of a processor: nothing is too costly because a machine is busy
    memory: int  # bytes
    answer: int  # bytes


class HelperProcess:
    """A process that runs a script. One thread may use it at a time."""

    def __init__(self, script: Path, patience_s: float) -> None:
        """`patience_s`: with a process that neither answers nor runs, such as one that was stopped. Raises OSError."""
        self.is_fit = False  # whether it can be asked again, as its last answer said
        self._greeting = json.dumps([*sys.path, str(_ROOT)]).encode() + b"\n"
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-I", "-S", str(script)]
        try:
            self._process = subprocess.Popen(  # in a session of its own, as Ctrl-C is not for it
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        except BaseException:
            self._socket.close()
            raise
        finally:
            theirs.close()
        self._socket.settimeout(patience_s)

    def ask_bytes(self, body: bytes, limits: HelperLimits) -> bytes:
        """The answer. Raises HelperRefusal, HelperEnded or TimeoutError."""
        self.is_fit = False
        head = HEAD.pack(len(body), limits.memory, limits.answer, limits.seconds)
        try:
            self._socket.sendall(self._greeting + head + body)
            kind, is_fit, length = ANSWER.unpack(self._receive(ANSWER.size))
            data = self._receive(length)
        except ConnectionError:
            self.close()
            raise self._why_ended(limits) from None
        self._greeting, self.is_fit = b"", is_fit
        if kind == helper_loop.TOO_LONG:
            raise TooCostly(f"it makes more than {limits.answer / MIB:.1f} MiB")
        if kind == helper_loop.REFUSED:
            raise HelperRefusal(data.decode("utf-8", "surrogatepass"))
        return data

    def _why_ended(self, limits: HelperLimits) -> Exception:
        status = self._process.returncode
        if status == -signal.SIGPROF:
            return TooCostly(f"it takes more than {limits.seconds:.1f} s of a processor")
        if status == helper_loop.OUT_OF_MEMORY:
            return TooCostly(f"it needs more than {limits.memory // MIB} MiB")
        if -status in _CRASHES:
            return TooCostly("it broke the process that it ran in")
        return HelperEnded(f"it ended with status {status}")

    def close(self) -> None:
        """Ends the process, unless it has ended. Its answers are lost."""
        self._socket.close()
        try:
            self._process.wait(1.0)  # it ends by itself when nobody asks any more
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def forget(self) -> None:
        """Leaves the process to another one, from which this one was forked."""
        self._socket.close()
        self._process.returncode = 0  # so that nobody here waits for it

    def _receive(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            part = self._next_part(min(size - len(received), MIB))
            if not part:
                raise ConnectionResetError
            received += part
        return bytes(received)

    def _next_part(self, most: int) -> bytes:
        """Waits while the process runs, however little of a busy machine it gets. Raises TimeoutError."""
        while True:
            before = self._time_used()
            try:
                return self._socket.recv(most)
            except TimeoutError:
                if self._time_used() == before:
                    raise

    def _time_used(self) -> float:
        """Seconds of a processor, by Linux's clock of each process; 0 elsewhere, and when it has ended."""
        try:
            return time.clock_gettime(~self._process.pid << 3 | 2)
        except OSError:
            return 0.0


Helper = TypeVar("Helper", bound=HelperProcess)
T = TypeVar("T")


class HelperPool(Generic[Helper]):
    """The helper processes of one kind of a program: as many as threads use at one time. Thread-safe."""

    def __init__(self, make: Callable[[], Helper], what: str) -> None:
        """`what` they do, for messages."""
        self._make = make
        self._what = what
        self._idle: list[Helper] = []
        self._lock = threading.Lock()

    def use(self, work: Callable[[Helper], T]) -> T:
        """What `work` returns, which asks a process. Raises what it raises, and Unreachable."""
        why: Exception | None = None
        for _ in range(TRIES):
            try:
                with self._lock:
                    idle = self._idle.pop() if self._idle else None
                return self._use_one(idle or self._make(), work)
            except TimeoutError:
                raise Unreachable(f"the process of {self._what} has been silent for long: retry") from None
            except (HelperEnded, OSError) as error:
                why = error
        raise Unreachable(f"the process of {self._what} cannot be used: {why}: retry", retry_after_ms=1000) from why

    def close(self) -> None:
        """Ends the processes that wait for work."""
        with self._lock:
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.close()

    def forget(self) -> None:
        """Leaves the processes to the program that this one was forked from."""
        idle, self._idle, self._lock = self._idle, [], threading.Lock()
        for helper in idle:
            helper.forget()

    def _use_one(self, helper: Helper, work: Callable[[Helper], T]) -> T:
        try:
            return work(helper)
        finally:
            with self._lock:
                kept = helper.is_fit and len(self._idle) < MAX_IDLE
                if kept:
                    self._idle.append(helper)
            if not kept:
                helper.close()


def tend(pool: "HelperPool[Any]") -> None:
    """Ends the processes of a pool with the program, and leaves them alone in processes that are forked from it."""
    atexit.register(pool.close)
    os.register_at_fork(after_in_child=pool.forget)
