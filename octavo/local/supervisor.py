"""Keeps processes alive: starts them, waits until they serve, and restarts those that end."""

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain

from octavo.local.append_only_file import DamagedFile
from octavo.local.embedded import EmbeddedStore
from octavo.local.state import CHOOSE_ANOTHER, ExitHistory
from octavo.process.child_process import ChildProcess, tail, trim_log
from octavo.process.command_error import CommandError
from octavo.process.machine import oom_kills
from octavo.process.telemetry import error_in
from octavo.request.errors import ServingError

FIRST_DELAY_S = 0.1
# A request outlives its last client for 10 s (--grace-ms), and clients try for minutes: within either, a process is
# started several times.
MAX_DELAY_S = 2.0
STABLE_S = 10.0  # after a life of this length the next restart is quick again
TRIM_INTERVAL_S = 5.0
POLL_S = 0.1
LAST_GRACE_S = 0.5  # what is left for what others use, where those have used up the time
WORD_S = 10.0  # how often `say` is told the same of a process that is starting, or that ends again and again


RestartableProcess = ChildProcess | EmbeddedStore


class StartError(CommandError):
    """A process did not begin to serve. `log` is the end of what it has logged in this life."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True, slots=True)
class SupervisedProcess:
    """A process, and a check whether it serves."""

    process: RestartableProcess
    ready: Callable[[], Awaitable[bool]]


class Supervisor:
    """Starts processes and keeps them alive. `say` gets lines for people; `changed` is called after each start and end.

    Run it in the main thread: a child process dies with the thread that starts it.
    """

    def __init__(self, say: Callable[[str], None], changed: Callable[[], None], *, restart: bool = True) -> None:
        self._restart = restart
        self._say = say
        self._changed = changed
        self._started: list[Sequence[SupervisedProcess]] = []  # by call of `start`
        self._keepers: list[asyncio.Task[None]] = []
        self._trimmer: asyncio.Task[None] | None = None
        self._log_starts: dict[str, int] = {}  # the size that a process's log had before its present life
        self._exits: dict[str, ExitHistory] = {}
        self._oom_kills = oom_kills()
        self._told: dict[str, tuple[str, float]] = {}  # by process: the reason that `say` was told last, and when

    async def start(self, processes: Sequence[SupervisedProcess], timeout_s: float) -> None:
        """Starts processes side by side and returns when all serve. From then on they are kept alive.

        Raises StartError if a process ends or does not serve in time. The others then still need `stop`.
        """
        self._started.append(processes)
        if self._trimmer is None:
            self._trimmer = asyncio.create_task(self._trim())
        try:
            async with asyncio.TaskGroup() as group:
                for supervised in processes:
                    group.create_task(self._first_start(supervised, timeout_s))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        self._keepers += [asyncio.create_task(self._keep(supervised)) for supervised in processes]

    def exits_of(self, name: str) -> ExitHistory:
        return self._exits.get(name, ExitHistory())

    async def watch(self) -> None:
        """Never returns. Raises StartError if a process cannot go on: its data is damaged, and no start mends that."""
        await asyncio.gather(*self._keepers)
        await asyncio.Event().wait()

    async def stop(self, grace_s: float) -> None:
        """Ends all processes within the grace time, and kills those that have not ended by then.

        Processes that were started together end together. They end before the processes that were started earlier,
        because they use those.
        """
        until = time.monotonic() + grace_s
        tasks = [*self._keepers, *([self._trimmer] if self._trimmer else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for processes in reversed(self._started):
            left_s = max(until - time.monotonic(), min(LAST_GRACE_S, grace_s))
            await asyncio.gather(*(supervised.process.stop(left_s) for supervised in processes))
        self._changed()

    async def _first_start(self, supervised: SupervisedProcess, timeout_s: float) -> None:
        process, began = supervised.process, time.monotonic()
        try:
            await self._begin(process)
        except (ServingError, DamagedFile, OSError) as error:
            raise StartError(f"{process.name} cannot start: {_reason(error)}", self._log_of(process)) from error
        self._changed()
        ended = asyncio.ensure_future(process.wait())
        next_word = began + WORD_S
        try:
            while not await supervised.ready():
                if ended.done():
                    raise self._start_error(process, f"ended with {self._how(ended.result())}")
                if time.monotonic() - began > timeout_s:
                    raise self._start_error(process, f"was not ready after {timeout_s:.0f} s")
                if time.monotonic() >= next_word:
                    late = f"{process.name}: not ready yet after {next_word - began:.0f} s"
                    self._say("; ".join(filter(None, [late, self._last_error(process), f"see {process.log}"])))
                    next_word += WORD_S
                await asyncio.wait([ended], timeout=POLL_S)
        finally:
            ended.cancel()
        self._say(f"{process.name}: ready after {time.monotonic() - began:.1f} s (pid {process.pid})")

    async def _keep(self, supervised: SupervisedProcess) -> None:
        process, delay_s, told = supervised.process, 0.0, False
        while True:
            began = time.monotonic()
            code = await self._wait(supervised, told)
            # A process that ended in order did so because it was told to: an error that it has logged is not why.
            reason = ": ".join(filter(None, [self._how(code), self._last_error(process) if code else ""]))
            self._note_exit(process, reason)
            if not self._restart:
                self._say(f"{process.name}: ended ({reason})")
                return
            delay_s = _next_delay_s(0.0 if time.monotonic() - began > STABLE_S else delay_s)
            told = self._tell_exit(process, reason, delay_s)
            while not await self._start_again(process, delay_s):
                reason, delay_s = self.exits_of(process.name).last_reason, _next_delay_s(delay_s)
                told = self._tell_exit(process, reason, delay_s)
            if told:
                self._say(f"{process.name}: started again (pid {process.pid})")

    async def _wait(self, supervised: SupervisedProcess, told: bool) -> int:
        """How the process ends. If its last end was told, it is told, too, when it serves again."""
        began, ended = time.monotonic(), asyncio.ensure_future(supervised.process.wait())
        try:
            while told and not ended.done():
                if await supervised.ready():
                    self._say(f"{supervised.process.name}: ready again after {time.monotonic() - began:.1f} s")
                    break
                await asyncio.wait([ended], timeout=POLL_S)
            return await ended
        finally:
            ended.cancel()

    async def _start_again(self, process: RestartableProcess, delay_s: float) -> bool:
        await asyncio.sleep(delay_s)
        try:
            await self._begin(process)
        except DamagedFile as error:
            raise StartError(f"{process.name} cannot start: {error}") from error
        except (ServingError, OSError) as error:
            self._note_exit(process, f"it cannot start: {_reason(error)}")
            return False
        self._changed()
        return True

    def _how(self, code: int) -> str:
        """How a process has ended, and why if the kernel has counted one more that it killed for want of memory."""
        before, self._oom_kills = self._oom_kills, oom_kills()
        out_of_memory = code == -signal.SIGKILL and self._oom_kills > before
        return _how(code) + (", probably by the kernel because there was no memory left" if out_of_memory else "")

    def _note_exit(self, process: RestartableProcess, reason: str) -> None:
        self._exits[process.name] = self.exits_of(process.name).another(reason)
        self._changed()

    def _tell_exit(self, process: RestartableProcess, reason: str, delay_s: float) -> bool:
        """Says why a process has ended; False if that was said a moment ago."""
        known, at = self._told.get(process.name, ("", 0.0))
        now = time.monotonic()
        if reason == known and now - at < WORD_S:
            return False
        self._told[process.name] = (reason, now)
        count = self.exits_of(process.name).count
        times = f", {count} times so far" if count > 1 else ""
        self._say(f"{process.name}: ended ({reason}{times}); starting again in {delay_s:.1f} s")
        return True

    async def _begin(self, process: RestartableProcess) -> None:
        self._log_starts[process.name] = process.log.stat().st_size if process.log.exists() else 0
        await process.start()

    def _log_of(self, process: RestartableProcess) -> str:
        """The end of what the process has logged in its present life."""
        return tail(process.log, since=self._log_starts.get(process.name, 0))

    def _last_error(self, process: RestartableProcess) -> str:
        """The last error that the process has logged in its present life; empty if there is none."""
        return next(filter(None, map(error_in, reversed(self._log_of(process).splitlines()))), "")

    def _start_error(self, process: RestartableProcess, what: str) -> StartError:
        why = ": ".join(filter(None, [what, self._last_error(process).rstrip(".")]))
        return StartError(f"{process.name} {why}; the whole log is {process.log}", self._log_of(process))

    async def _trim(self) -> None:
        while True:
            for supervised in chain.from_iterable(self._started):
                with contextlib.suppress(OSError):  # a full disk: the log is cut, and its end is not kept
                    trim_log(supervised.process.log)
            await asyncio.sleep(TRIM_INTERVAL_S)


def _reason(error: ServingError | DamagedFile | OSError) -> str:
    if isinstance(error, OSError):
        return f"{error.filename or error}: {error.strerror}: mend it, or {CHOOSE_ANOTHER}"
    return error.message if isinstance(error, ServingError) else str(error)


def _next_delay_s(delay_s: float) -> float:
    return min(max(2 * delay_s, FIRST_DELAY_S), MAX_DELAY_S)


def _how(code: int) -> str:
    if code >= 0:
        return f"code {code}"
    try:
        name = f" {signal.Signals(-code).name}"
    except ValueError:  # a signal without a name
        name = ""
    return f"signal {-code}{name}"
