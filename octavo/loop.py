"""How a program runs its event loop, and how it is asked to end."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The process was asked to end while it was still starting."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` as asyncio.run does, on uvloop if that is installed. A message costs half as much there."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def stop_event() -> asyncio.Event:
    """An event that is set when SIGTERM or SIGINT asks the process to end."""
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop


async def before(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises Stopped, and cancels `work`, if `stop` is set before `work` is done."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        raise Stopped
    return working.result()
