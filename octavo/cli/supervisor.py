"""Keeps processes alive: starts them, waits until they serve, starts those again that end."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from octavo.cli.child import Unit, tail, trim_log
from octavo.errors import ServingError

FIRST_DELAY_S = 0.1
MAX_DELAY_S = 10.0
STABLE_S = 30.0  # a life this long makes the next restart quick again
TRIM_INTERVAL_S = 5.0
POLL_S = 0.1
WORD_S = 10.0  # how often a person hears that something is still starting


class StartError(Exception):
    """A process did not come up. The message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Service:
    """A process and how to tell that it serves."""

    unit: Unit
    ready: Callable[[], Awaitable[bool]]


class Supervisor:
    """Runs services. `say` is told what a person wants to know; `changed` is called after each start and end.

    Run it in the main thread: children die with the thread that starts them.
    """

    def __init__(self, say: Callable[[str], None], changed: Callable[[], None], *, restart: bool = True) -> None:
        self._restart = restart
        self._say = say
        self._changed = changed
        self._services: list[Service] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._trimmer: asyncio.Task[None] | None = None

    async def start(self, services: Sequence[Service], timeout_s: float) -> None:
        """Starts services side by side and returns when all serve; from then on they are kept alive.

        Raises StartError if one ends or is not ready in time; what has been started still needs `stop`.
        """
        self._services += services
        if self._trimmer is None:
            self._trimmer = asyncio.create_task(self._trim())
        try:
            async with asyncio.TaskGroup() as group:
                for service in services:
                    group.create_task(self._first_start(service, timeout_s))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._keepers += [asyncio.create_task(self._keep(service)) for service in services]

    async def watch(self) -> None:
        """Never returns; raises what went wrong in here, if anything does."""
        await asyncio.gather(*self._keepers)
        await asyncio.Event().wait()

    async def stop(self, grace_s: float) -> None:
        """Ends everything, in the reverse order of starting: those who use others first."""
        tasks = [*self._keepers, *([self._trimmer] if self._trimmer else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        kinds = {service.unit.name.partition("-")[0]: None for service in self._services}
        for kind in reversed(kinds):
            units = [service.unit for service in self._services if service.unit.name.partition("-")[0] == kind]
            await asyncio.gather(*(unit.stop(grace_s) for unit in units))
        self._changed()

    async def _first_start(self, service: Service, timeout_s: float) -> None:
        unit, began = service.unit, time.monotonic()
        try:
            await unit.start()
        except (ServingError, OSError) as error:
            raise StartError(f"{unit.name}: {error}") from error
        self._changed()
        ended = asyncio.ensure_future(unit.wait())
        next_word = began + WORD_S
        try:
            while not await service.ready():
                if ended.done():
                    raise StartError(_story(unit, f"ended with {_how(ended.result())}"))
                if time.monotonic() - began > timeout_s:
                    raise StartError(_story(unit, f"was not ready after {timeout_s:.0f} s"))
                if time.monotonic() >= next_word:
                    self._say(f"{unit.name}: not ready yet after {next_word - began:.0f} s; see {unit.log}")
                    next_word += WORD_S
                await asyncio.wait([ended], timeout=POLL_S)
        finally:
            ended.cancel()
        self._say(f"{unit.name}: ready after {time.monotonic() - began:.1f} s (pid {unit.pid})")

    async def _keep(self, service: Service) -> None:
        unit, delay_s = service.unit, FIRST_DELAY_S / 2
        while True:
            began = time.monotonic()
            code = await unit.wait()
            self._changed()
            if not self._restart:
                self._say(f"{unit.name}: ended ({_how(code)})")
                return
            delay_s = FIRST_DELAY_S if time.monotonic() - began > STABLE_S else min(delay_s * 2, MAX_DELAY_S)
            while not await self._start_again(unit, code, delay_s):
                delay_s = min(delay_s * 2, MAX_DELAY_S)

    async def _start_again(self, unit: Unit, code: int, delay_s: float) -> bool:
        self._say(f"{unit.name}: ended ({_how(code)}); starting again in {delay_s:.1f} s")
        await asyncio.sleep(delay_s)
        try:
            await unit.start()
        except (ServingError, OSError) as error:
            self._say(f"{unit.name}: {error}")
            return False
        self._changed()
        self._say(f"{unit.name}: started again (pid {unit.pid})")
        return True

    async def _trim(self) -> None:
        while True:
            for service in self._services:
                trim_log(service.unit.log)
            await asyncio.sleep(TRIM_INTERVAL_S)


def _story(unit: Unit, what: str) -> str:
    return f"{unit.name} {what}. The end of {unit.log}:\n{tail(unit.log)}"


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"code {code}"
