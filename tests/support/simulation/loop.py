"""An event loop whose time jumps to the next timer when nothing is ready, and the hosts whose tasks it runs.

A host stands for one process. Its tasks, timers and callbacks carry the host in their context, wherever they were
scheduled. So the loop can do to a host what signals do to a process: a dead host's callbacks are dropped, as by
SIGKILL, and a paused host's callbacks wait until it goes on, as between SIGSTOP and SIGCONT.
"""

import asyncio
import heapq
import random
from asyncio.events import Handle, TimerHandle
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from itertools import count
from typing import Any

HOST: "ContextVar[Host | None]" = ContextVar("host", default=None)
MAX_CALLBACKS = 3_000_000  # of one run: more means that something turns in circles

_numbers = count(1)


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set, but the simulation has not ended; or time stands still."""


class SimTask(asyncio.Task):
    """A task whose hash is a number, so that sets of tasks have the same order in every run.

    `host` is the one that runs it; None: the simulation itself.
    """

    host: "Host | None"

    def __new__(cls, *args: Any, **kwargs: Any) -> "SimTask":
        task = super().__new__(cls)
        task.number = next(_numbers)
        return task

    def __hash__(self) -> int:
        return self.number


class Host:
    """One simulated process, or a machine that is never restarted (the store, a client)."""

    def __init__(self, loop: "SimLoop", name: str, rng: random.Random) -> None:
        self.loop = loop
        self.name = name
        self.rng = rng
        self.alive = True
        self.paused = False
        self.vanished = False  # its machine is gone: whoever sends to it hears nothing, not even a reset
        self.parked: list[Handle] = []  # what waits until the host goes on
        self.exit_status: int | None = None
        self.signal_handlers: dict[int, tuple[Callable[..., object], tuple[Any, ...]]] = {}
        self.hangs_until = 0.0  # a step of its engine does not end before
        self.calls_left: int | None = None  # of the store: it dies at the last one
        self.program: Any = None  # the Router or Worker, once it has been made
        self.main: asyncio.Task[Any] | None = None
        self.monotonic_offset = rng.uniform(0.0, 1e6)  # every machine counts from its own start
        self.monotonic_rate = 1.0
        self.wall_offset = 0.0
        self.busy_s = 0.0  # what perf_counter shows besides the time that has passed: work that took no virtual time
        self.on_death: list[Callable[[], None]] = []
        self._context = copy_context()
        self._context.run(HOST.set, self)

    def __repr__(self) -> str:
        return self.name

    @property
    def context(self) -> Context:
        """A context of this host. Each caller gets a copy, because a context cannot be entered twice."""
        return self._context.copy()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return self.loop.create_task(work, context=self.context)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.loop.call_soon(callback, *args, context=self.context)

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        return self.loop.call_later(delay_s, callback, *args, context=self.context)

    def monotonic(self) -> float:
        return self.monotonic_offset + self.loop.time() * self.monotonic_rate

    def signal(self, number: int) -> None:
        """Runs the host's handler of the signal."""
        callback, args = self.signal_handlers[number]
        self.call_soon(callback, *args)

    def pause(self) -> None:
        self.paused = True

    def resume(self) -> None:
        self.paused = False
        parked, self.parked = self.parked, []
        self.loop.run_again(parked)

    def die(self, status: int) -> None:
        """Ends the host at once: nothing of it runs any more, not even `finally` blocks."""
        if self.alive:
            self.alive, self.exit_status = False, status
            self.parked.clear()
            for callback in self.on_death:
                callback()


class SimLoop(asyncio.BaseEventLoop):
    """Runs ready callbacks in order. When none is ready, its time becomes that of the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self.num_callbacks = 0
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now

    @staticmethod
    def _make_task(
        loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Context | None = None
    ) -> SimTask:
        task = SimTask(work, loop=loop, context=context)
        task.host = context.get(HOST) if context else HOST.get()
        return task

    def run_again(self, handles: list[Handle]) -> None:
        """Makes handles ready that were taken out of the queue before."""
        self._ready.extend(handles)

    def add_signal_handler(self, sig: int, callback: Callable[..., object], *args: Any) -> None:
        host = HOST.get()
        if host is not None:
            host.signal_handlers[sig] = (callback, args)

    def remove_signal_handler(self, sig: int) -> bool:
        host = HOST.get()
        return host is not None and host.signal_handlers.pop(sig, None) is not None

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Calls `func` at once: work in threads takes no virtual time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _write_to_self(self) -> None:
        """There is no other thread that would have to wake this loop."""

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> TimerHandle:
        timer = TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(_numbers), timer))  # those of one moment in the order they were set
        return timer

    def _run_once(self) -> None:
        timers, ready = self._timers, self._ready
        while not ready:
            if not timers:
                raise Deadlock("nothing is ready, and no timer is set")
            when, _, timer = heapq.heappop(timers)
            if not timer._cancelled:
                self._now = max(self._now, when)
                ready.append(timer)
        while timers and timers[0][0] <= self._now:
            timer = heapq.heappop(timers)[2]
            if not timer._cancelled:
                ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:
                continue
            host = handle._context.get(HOST)
            if host is not None:
                if not host.alive:
                    continue
                if host.paused:
                    host.parked.append(handle)
                    continue
            self.num_callbacks += 1
            handle._run()
        if self.num_callbacks > MAX_CALLBACKS:
            raise Deadlock(f"{MAX_CALLBACKS} callbacks, and no end")

    def _timer_handle_cancelled(self, handle: TimerHandle) -> None:
        """Cancelled timers stay in the heap until their time has come."""
