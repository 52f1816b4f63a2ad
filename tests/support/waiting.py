"""Waiting for what other tasks, threads or processes do."""

import asyncio
import time
from collections.abc import Callable

from effort import patience


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Waits for a condition, which may be a coroutine function; longer on a busy machine."""
    async with asyncio.timeout(patience(seconds)):
        while True:
            found = condition()
            asks = asyncio.iscoroutine(found)  # which takes processor time from those that it waits for
            if await found if asks else found:
                return
            await asyncio.sleep(0.05 if asks else 0.01)


def wait_until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """As `until`, of a thread."""
    end = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
