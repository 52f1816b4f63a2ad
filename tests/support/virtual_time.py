"""An event loop whose time jumps to the next timer as soon as nothing is ready: minutes pass in milliseconds."""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: what should be waited is added to the loop's time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found:
            if timeout is None:
                raise RuntimeError("nothing is ready and no timer is set: this would hang")
            self.now += max(timeout, 0.0)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.selector = _JumpingSelector()
        super().__init__(self.selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.selector.now

    def spend(self, seconds: float) -> None:
        """Lets time pass while the loop does not run, as a program that computes does."""
        self.selector.now += seconds


def run_virtually(main: Coroutine[Any, Any, T], monkeypatch: pytest.MonkeyPatch) -> T:
    """The result of `main`, for which time.perf_counter is the loop's time. Fails if it leaves tasks behind."""
    loop = VirtualLoop()
    with monkeypatch.context() as patched:
        patched.setattr(time, "perf_counter", loop.time)
        try:
            result = loop.run_until_complete(main)
            left = asyncio.all_tasks(loop)
            assert not left, f"tasks are left: {left}"
            return result
        finally:
            loop.close()
