"""How a program runs its event loop, how it is asked to end, and how it ends its tasks."""

import asyncio
import signal
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound="asyncio.Future[Any]")

CANCEL_AGAIN_S = 1.0  # how long a cancelled task may take to end before it is cancelled again


class Stopped(Exception):
    """The process was asked to end while it was still starting."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` as asyncio.run does, on uvloop if that is installed. A message costs half as much there."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


class StopRequest:
    """What signals ask of the process. SIGTERM asks it to end; a second SIGTERM, or SIGINT, asks it to end at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()  # the process is to end, and has time to give away what it does
        self.urgent = asyncio.Event()  # it has no more time; `asked` is set, too

    def note_signal(self, number: int) -> None:
        if self.asked.is_set() or number == signal.SIGINT:
            self.urgent.set()
        self.asked.set()


def stop_request() -> StopRequest:
    """What SIGTERM and SIGINT ask of the process from now on. They do not end it by themselves any more."""
    request = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, request.note_signal, number)
    return request


async def before(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises Stopped, and cancels `work`, if `stop` is set before `work` is done."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        raise Stopped
    return working.result()


def unlogged(future: F) -> F:
    """The future itself. If its caller is cancelled and nobody waits for it any more, its error is not logged."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def shared(future: "asyncio.Future[T]") -> T:
    """What the future brings. It goes on if the caller is cancelled; then nobody need wait for it any more."""
    await asyncio.wait({unlogged(future)})
    return future.result()


async def end_tasks(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancels the tasks until all have ended. A library may lose a cancellation, and a loop would then go on."""
    going = set(tasks)
    while going:
        for task in going:
            task.cancel()
        _, going = await asyncio.wait(going, timeout=CANCEL_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
