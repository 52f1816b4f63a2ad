"""Lets Ctrl-C take effect between steps instead of within a step, so that the scheduler is never left half done."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Self

Handler = Callable[[int, FrameType | None], object]


class InterruptGuard:
    """A context in which SIGINT waits for `deliver_interrupt`, which calls the handler installed before the guard.

    A second SIGINT is delivered at once. A SIGINT that still waits when the block ends is delivered there, but is lost
    if the block ends with another exception. The guard changes nothing outside the main thread, and nothing where
    SIGINT is ignored or ends the process.
    """

    def __init__(self) -> None:
        self._previous: Handler | None = None
        self._noted: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> Self:
        previous = signal.getsignal(signal.SIGINT)
        if callable(previous) and threading.current_thread() is threading.main_thread():
            self._previous = previous
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        if kind is None:
            self.deliver_interrupt()

    def deliver_interrupt(self) -> None:
        """Calls the handler installed before the guard if a SIGINT waits. Call it where nothing is half done."""
        if self._noted is not None and self._previous is not None:
            noted, self._noted = self._noted, None
            self._previous(*noted)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        again = self._noted is not None
        self._noted = (signum, frame)
        if again:
            self.deliver_interrupt()
