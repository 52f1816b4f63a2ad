"""Work that nobody waits for: loops that outlive their errors, tasks that end with the router; and patient calls."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from octavo.errors import StoreUnavailable

log = logging.getLogger(__name__)

T = TypeVar("T")

PAUSE_S = 0.5  # of a loop, after an error
RETRY_S = 0.1
PATIENCE_S = 20.0


async def repeat_forever(what: str, once: Callable[[], Awaitable[object]]) -> None:
    """Does `once` again and again. No error ends it: it is logged, and the next round comes a little later."""
    while True:
        try:
            await once()
        except StoreUnavailable as error:
            log.warning("%s: %s", what, error)
            await asyncio.sleep(PAUSE_S)
        except Exception:
            log.exception("%s: this round failed", what)
            await asyncio.sleep(PAUSE_S)


async def patiently(call: Callable[[], Awaitable[T]], patience_s: float = PATIENCE_S) -> T:
    """The answer of a store function, through an outage of that length: calling again gives the first answer."""
    until = time.monotonic() + patience_s
    while True:
        try:
            return await call()
        except StoreUnavailable:
            if time.monotonic() >= until:
                raise
            await asyncio.sleep(RETRY_S)


class BackgroundTasks:
    """Tasks of their own. Errors are logged, and whatever the task was to do is left to the next sweep."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            if isinstance(error, StoreUnavailable):
                log.warning("left to the next sweep: %s", error)
            else:
                log.error("left to the next sweep", exc_info=error)
