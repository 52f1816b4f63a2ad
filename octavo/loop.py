"""The event loop of a program: uvloop where it is installed, which costs half as much per message; and how it ends."""

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Stopped(Exception):
    """The process was asked to end while it was still starting."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def stop_event() -> asyncio.Event:
    """Set when the process is asked to end, by SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)
    return stop


async def before(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, unless the process is asked to end before it is there: Stopped."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        raise Stopped
    return working.result()
