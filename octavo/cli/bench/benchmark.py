"""A whole run: a warm-up of each endpoint, then rounds, in which two endpoints take turns (A, B, A, B, …)."""

import asyncio
import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from octavo.cli.bench.arrivals import ArrivalProcess
from octavo.cli.bench.conversation import Conversation
from octavo.cli.bench.driver import RoundDriver, RoundOptions
from octavo.cli.bench.endpoint_base import BenchEndpoint
from octavo.cli.bench.measurement import RequestMeasurement, RoundMeasurement
from octavo.cli.bench.token_counter import TokenCounter
from octavo.cli.bench.traffic import Traffic

SIDES = ("A", "B")
WARM_UP = -1  # the number of the round that does not count


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
        """The arrival times of a round. Both endpoints get the same."""
        arrivals = self.settings.arrivals
        return arrivals.offsets(random.Random(f"{self.settings.seed}/arrivals/{number}")) if arrivals else None

    @property
    def _warm_up_users(self) -> int:
        return min(self.settings.concurrency, self.settings.warm_up)
