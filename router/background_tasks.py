"""Loops that outlive their errors, and tasks that no caller waits for and that end with the router."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from octavo.process.loop import end_tasks
from octavo.request.errors import StoreUnavailable

log = logging.getLogger(__name__)

PAUSE_S = 0.5  # of a loop, after an error


async def repeat_forever(name: str, once: Callable[[], Awaitable[object]]) -> None:
    """Awaits `once` again and again. No error ends the loop: it is logged, and the next round starts after a pause."""
    while True:
        try:
            await once()
        except StoreUnavailable as error:
            log.warning("%s: %s", name, error)
            await asyncio.sleep(PAUSE_S)
        except Exception:
            log.exception("%s: this round failed", name)
            await asyncio.sleep(PAUSE_S)


class BackgroundTasks:
    """Tasks that no caller waits for, which a later sweep or take repairs if they fail. A task's error is logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[object]] = set()

    def spawn(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    async def close(self) -> None:
        """Cancels the tasks and waits until they have ended."""
        await end_tasks(list(self._tasks))

    def _forget(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            if isinstance(error, StoreUnavailable):
                log.warning("left to the next sweep: %s", error)
            else:
                log.error("left to the next sweep", exc_info=error)
