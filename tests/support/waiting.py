"""Waiting for what other tasks, threads or processes do."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Waits for a condition, which may be a coroutine function."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.01)
