"""A whole run: a warm-up of each endpoint, then rounds, in which two endpoints take turns (A, B, A, B, …).

Closed loop: a number of users, each of whom sends a request when the one before has ended. Open loop: requests arrive
at given times, whether or not earlier ones have ended. In both, a latency counts from the moment at which the request
should have been sent.
"""

import asyncio
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice

from octavo.process.loop import end_tasks
from octavo_bench.distributions import ArrivalProcess
from octavo_bench.endpoints.base import BenchEndpoint, RequestFailed
from octavo_bench.measurement import INTERRUPTED, RequestMeasurement, RoundMeasurement
from octavo_bench.token_counter import TokenCounter
from octavo_bench.traffic import Conversation, Traffic

FAILURE_PAUSE_S = 0.2  # of a user of a closed loop: an endpoint that refuses at once is not called in a hot loop
LAG_SAMPLE_S = 0.05
SIDES = ("A", "B")
WARM_UP = -1  # the number of the round that does not count


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """How a round is sent: by `num_users` users, or at the times of `offsets` if there are any.

    It ends after `num_conversations`, or begins none after `seconds`; at least one of them is given.
    """

    num_users: int = 0
    offsets: Iterator[float] | None = None
    num_conversations: int | None = None
    seconds: float | None = None


@dataclass(slots=True)
class RoundDriver:
    """Runs rounds on one endpoint. `on_end` is called at the end of each request."""

    endpoint: BenchEndpoint
    timeout_s: float
    on_end: Callable[[RequestMeasurement], None] = lambda _: None
    _requests: list[RequestMeasurement] = field(default_factory=list)

    async def run_round(
        self, number: int, conversations: Iterator[Conversation], load: RoundOptions, stop: asyncio.Event
    ) -> RoundMeasurement:
        """Runs one round to its end, or until `stop` is set.

        Then the requests under way are cut and marked as interrupted. No task is left when this returns.
        """
        self._requests = []
        lags: list[float] = []
        began_at, cpu_s = time.perf_counter(), time.process_time()
        limited = islice(conversations, load.num_conversations)
        users = self._open_loop(limited, load, began_at) if load.offsets else self._closed_loop(limited, load, began_at)
        working, stopping = asyncio.create_task(users), asyncio.create_task(stop.wait())
        sampling = asyncio.create_task(_sample_lags(lags))
        try:
            await asyncio.wait([working, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            cut = not working.done()
            await end_tasks([working, stopping, sampling])
        if not cut:
            working.result()  # raises what is a bug
        return RoundMeasurement(
            number, began_at, time.perf_counter(), self._requests, time.process_time() - cpu_s, lags, cut
        )

    async def _closed_loop(self, conversations: Iterator[Conversation], load: RoundOptions, began_at: float) -> None:

        async def user() -> None:
            while load.seconds is None or time.perf_counter() - began_at < load.seconds:
                conversation = next(conversations, None)
                if conversation is None:
                    return
                if not await self._converse(conversation, time.perf_counter()):
                    await asyncio.sleep(FAILURE_PAUSE_S)

        async with asyncio.TaskGroup() as group:
            for _ in range(load.num_users):
                group.create_task(user())

    async def _open_loop(self, conversations: Iterator[Conversation], load: RoundOptions, began_at: float) -> None:
        async with asyncio.TaskGroup() as group:
            # The next prompt is made before the time at which it is sent.
            for conversation, offset in zip(conversations, load.offsets or iter(()), strict=False):
                if load.seconds is not None and offset >= load.seconds:
                    return
                await _sleep_until(began_at + offset)
                group.create_task(self._converse(conversation, began_at + offset))

    async def _converse(self, conversation: Conversation, intended_at: float) -> bool:
        """Sends the turns of a conversation, until one of them fails. False if one did."""
        while True:
            request = await self._measure(conversation, intended_at)
            if not request.completed:
                return False
            conversation.answers.append(request.text)
            if conversation.has_ended:
                return True
            pause_s = conversation.turns[len(conversation.answers)].pause_s
            intended_at = request.ended_at + pause_s
            await _sleep_until(intended_at)

    async def _measure(self, conversation: Conversation, intended_at: float) -> RequestMeasurement:
        asked = conversation.next_request()
        request = RequestMeasurement(len(self._requests), intended_at, asked.max_tokens)
        self._requests.append(request)
        request.sent_at = time.perf_counter()
        try:
            async with asyncio.timeout(self.timeout_s), aclosing(self.endpoint.stream(asked)) as stream:
                async for part in stream:
                    request.note_part(part, time.perf_counter())
            if not request.output_tokens:  # tokens without a text are an answer, too
                request.reason, request.message = "no output", "the stream ended without a token"
        except RequestFailed as error:
            request.reason, request.message = error.reason, error.message
        except TimeoutError:
            request.reason, request.message = (
                "timeout",
                f"no end within {self.timeout_s:g} s; --request-timeout sets another",
            )
        except asyncio.CancelledError:
            request.reason = INTERRUPTED
            raise
        finally:
            request.ended_at = time.perf_counter()
            self.on_end(request)
        return request


async def _sleep_until(moment: float) -> None:
    """Wakes at the moment or after it: timers of uvloop, which are rounded to milliseconds, may be early by one."""
    await asyncio.sleep(moment - time.perf_counter())
    if (left_s := moment - time.perf_counter()) > 0:
        await asyncio.sleep(left_s + 0.001)


async def _sample_lags(lags: list[float]) -> None:
    """Notes how much too late the event loop wakes a task: the generator's own delay of every event."""
    while True:
        wake_at = time.perf_counter() + LAG_SAMPLE_S
        await asyncio.sleep(LAG_SAMPLE_S)
        lags.append(max(0.0, time.perf_counter() - wake_at))


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """How each round is sent: closed loop with `concurrency` users, or open loop if there are `arrivals`."""

    concurrency: int = 16
    arrivals: ArrivalProcess | None = None
    num_conversations: int | None = None
    seconds: float | None = None
    rounds: int = 1
    warm_up: int = 0  # conversations before the first round of each endpoint
    request_timeout_s: float = 600.0
    seed: int = 0


@dataclass(slots=True)
class Benchmark:
    """One run. After `run`, also after one that was stopped, `rounds` has what was measured of each endpoint."""

    endpoints: Sequence[BenchEndpoint]
    traffic: Traffic
    settings: BenchSettings
    counter: TokenCounter | None = None
    on_end: Callable[[int, RequestMeasurement], None] = lambda *_: None  # not called in the warm-up
    rounds: list[list[RoundMeasurement]] = field(default_factory=list)

    async def run(self, stop: asyncio.Event) -> None:
        """Runs all rounds, or until `stop` is set."""
        self.rounds = [[] for _ in self.endpoints]
        for side in range(len(self.endpoints)):
            if self.settings.warm_up and not stop.is_set():
                await self._run_round(side, WARM_UP, stop)
        gc.collect()
        gc.freeze()  # what lives by now is not looked through again in the middle of a round
        try:
            for number in range(self.settings.rounds):
                for side in range(len(self.endpoints)):
                    if stop.is_set():
                        return
                    self.rounds[side].append(await self._run_round(side, number, stop))
        finally:
            gc.unfreeze()

    async def _run_round(self, side: int, number: int, stop: asyncio.Event) -> RoundMeasurement:
        driver = RoundDriver(self.endpoints[side], self.settings.request_timeout_s)
        if number == WARM_UP:
            load = RoundOptions(self._warm_up_users, num_conversations=self.settings.warm_up)
        else:
            driver.on_end = lambda request: self.on_end(side, request)
            load = RoundOptions(
                self.settings.concurrency, self._offsets(number), self.settings.num_conversations, self.settings.seconds
            )
        measured = await driver.run_round(number, self._conversations(side, number, load), load, stop)
        if self.counter is not None:
            for request in measured.requests:
                if request.counted_by == "events":
                    request.counted_tokens = self.counter.count(request.text)
        return measured

    def _conversations(self, side: int, number: int, load: RoundOptions) -> Iterator[Conversation]:
        """Those of a round, made before it begins if their number is known: making them takes the generator's time."""
        made = self.traffic.conversations(side, number)
        return made if load.num_conversations is None else iter(list(islice(made, load.num_conversations)))

    def _offsets(self, number: int) -> Iterator[float] | None:
        """The arrival times of a round, the same for both endpoints."""
        arrivals = self.settings.arrivals
        return arrivals.offsets(random.Random(f"{self.settings.seed}/arrivals/{number}")) if arrivals else None

    @property
    def _warm_up_users(self) -> int:
        return min(self.settings.concurrency, self.settings.warm_up)
