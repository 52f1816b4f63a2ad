"""Whom the store blames for deaths: a fleet of workers, its routers and its streams, in simulated time."""

import random
from dataclasses import dataclass, field

import pytest

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.sampling import FinishReason
from octavo.store.calls import AppendItem, Finish, QueueLimits, TakeReason, TakeRequest, TakeStatus
from octavo.store.memory import MemoryState, MemoryStore

TICK_MS = 100
TOKENS_PER_TICK = 3
PREFILL_MS = (100, 500)
RESTART_MS = (300, 2000)
NOTICED_MS = (700, 1300)  # after a death: a broken connection, a probe, and a missed renewal
BELIEF_MS = 150  # how long routers take a dead worker for alive
STREAM_TOKENS = 600
LIMITS = QueueLimits(10**6, 10**12)


@dataclass
class FleetWorker:
    """One place for a worker, in which one process life follows the other."""

    number: int
    life: int = 0
    up: bool = True
    died_ms: int = 0
    back_ms: int = 0  # when the next life begins
    streams: list["FleetStream"] = field(default_factory=list)  # no set: a seed gives the same run every time

    @property
    def incarnation(self):
        return Incarnation(f"w{self.number}-{self.life}")


@dataclass(eq=False)
class FleetStream:
    """A stream, as its client sees it."""

    seq_id: SequenceId
    fatal_after: int | None = None  # it kills its worker when it has so many tokens; None: it is innocent
    tokens: int = 0
    journalled: int = 0
    suspected: bool = False
    epoch: int = 0
    worker: FleetWorker | None = None
    running_from_ms: int = 0  # the end of its prefill
    reason: TakeReason = TakeReason.QUEUED
    next_take_ms: int | None = 0  # None: it has an owner
    waited_ms: int = 0
    alone: bool = False
    announced: bool = False
    deaths: int = 0  # workers that it has killed
    failed: bool = False
    stalled_from_ms: int = 0
    longest_stall_ms: int = 0


class Fleet:
    """Workers that are killed and come back, and streams that routers move from dead workers to living ones."""

    def __init__(self, new, seed):
        self.now_ms = 1_000_000_000_000
        self.random = random.Random(seed)
        self.state = MemoryState(lambda: self.now_ms)
        self.store = MemoryStore(self.state)
        self.workers = [FleetWorker(number) for number in range(4)]
        self.streams: list[FleetStream] = []
        self.ended: list[FleetStream] = []
        self._new = new

    async def add_streams(self, count):
        for _ in range(count):
            await self.add_stream()
        return self

    async def add_stream(self, fatal_after=None):
        seq_id = SequenceId(f"{len(self.streams) + len(self.ended):032x}")
        await self.store.accept(self._new(seq_id=seq_id, max_tokens=STREAM_TOKENS), LIMITS)
        stream = FleetStream(seq_id, fatal_after, next_take_ms=self.now_ms, stalled_from_ms=self.now_ms)
        self.streams.append(stream)
        return stream

    def kill(self, worker):
        worker.up, worker.died_ms, worker.back_ms = False, self.now_ms, self.now_ms + self._within(RESTART_MS)
        for stream in worker.streams:
            stream.reason, stream.next_take_ms = TakeReason.CONNECTION, self.now_ms + self._within(NOTICED_MS)
            stream.worker = None
        worker.streams.clear()

    async def run(self, seconds, kills_ms=()):
        """Lets time pass; at each of the given times one living worker at random dies."""
        begun, kills = self.now_ms, sorted(kills_ms)
        while self.now_ms < begun + seconds * 1000:
            self.now_ms += TICK_MS
            for worker in self.workers:
                if not worker.up and worker.back_ms <= self.now_ms:
                    worker.up, worker.life = True, worker.life + 1
            while kills and begun + kills[0] <= self.now_ms:
                kills.pop(0)
                if living := [worker for worker in self.workers if worker.up]:
                    self.kill(self.random.choice(living))
            for stream in list(self.streams):
                await self._advance(stream)
                if stream.failed or stream.tokens >= STREAM_TOKENS:
                    self.streams.remove(stream)
                    self.ended.append(stream)
                    await self.add_stream()

    async def _advance(self, stream):
        if stream.worker is not None:
            await self._compute(stream, stream.worker)
        elif stream.next_take_ms is not None and stream.next_take_ms <= self.now_ms:
            await self._take(stream)

    async def _compute(self, stream, worker):
        on_trial = next((each for each in worker.streams if each.alone), stream)
        if on_trial is not stream or stream.running_from_ms > self.now_ms:
            return
        if stream.alone and not stream.announced:
            stream.announced = True
            assert await self.store.announce(stream.seq_id, stream.epoch, worker.incarnation)
        if stream.fatal_after is not None and stream.tokens + TOKENS_PER_TICK > stream.fatal_after:
            stream.deaths += 1
            self.kill(worker)
            return
        stream.tokens = min(STREAM_TOKENS, stream.tokens + TOKENS_PER_TICK)
        if stream.suspected:  # what others journal changes nothing here
            await self._journal(stream, worker)
        stream.longest_stall_ms = max(stream.longest_stall_ms, self.now_ms - stream.stalled_from_ms)
        stream.stalled_from_ms = self.now_ms
        if stream.tokens >= STREAM_TOKENS:
            worker.streams.remove(stream)
            await self.store.finish(Finish(stream.seq_id, FinishReason.LENGTH))

    async def _journal(self, stream, worker):
        tokens = [1] * (stream.tokens - stream.journalled)
        item = AppendItem(stream.seq_id, stream.epoch, 0, stream.journalled, tokens)
        await self.store.append_batch(worker.incarnation, [item])
        stream.journalled = stream.tokens
        record = (await self.store.read(stream.seq_id)).record
        stream.suspected = record.crashes > 0
        stream.alone = stream.alone and stream.suspected

    async def _take(self, stream):
        occupied: set[int] = set()
        while candidates := [each for each in self.workers if self._seems_up(each) and each.number not in occupied]:
            worker = min(candidates, key=lambda each: (len(each.streams), self.random.random()))
            owner, reason = worker.incarnation, stream.reason
            take_id = f"{stream.epoch}-{self.now_ms}-{owner}"
            request = TakeRequest(stream.seq_id, stream.epoch, owner, take_id, reason, stream.waited_ms)
            taken = await self.store.take_ownership(request)
            if taken.status is TakeStatus.POISON:
                stream.failed = True
                return
            if taken.status is TakeStatus.OCCUPIED:
                occupied.add(worker.number)
                continue
            assert taken.status is TakeStatus.OK
            stream.epoch, stream.waited_ms, stream.suspected = taken.epoch, 0, taken.crashes > 0
            if not worker.up:
                stream.reason, stream.next_take_ms = TakeReason.CONNECTION, self.now_ms + self._within(NOTICED_MS)
                return
            stream.announced = not taken.suspect
            if taken.epoch > 1 and not taken.suspect:
                assert await self.store.announce(stream.seq_id, taken.epoch, owner)
            stream.worker, stream.alone, stream.next_take_ms = worker, taken.suspect, None
            stream.running_from_ms = self.now_ms + self._within(PREFILL_MS)
            worker.streams.append(stream)
            return
        stream.next_take_ms = self.now_ms + 250
        if occupied:
            stream.waited_ms += 250

    def _seems_up(self, worker):
        return worker.up or self.now_ms - worker.died_ms < BELIEF_MS

    def _within(self, bounds):
        return self.random.randint(*bounds)

    @property
    def poisoned(self):
        return [stream for stream in [*self.streams, *self.ended] if stream.failed]


@pytest.mark.timeout(300)
async def test_random_deaths_blame_nobody(new):
    """Four hundred deaths in a quarter of an hour, sixty streams; and nobody waits long for another suspect."""
    fleet, kills = await Fleet(new, 20261122).add_streams(60), random.Random(20261122)
    await fleet.run(900, [kills.randrange(900_000) for _ in range(400)])
    every = [*fleet.streams, *fleet.ended]
    assert fleet.poisoned == []
    assert len(every) > 2000
    assert len(fleet.state.deaths) > 200
    assert max(stream.longest_stall_ms for stream in every) < 20_000


@pytest.mark.parametrize("fatal_after", [0, 7, 300])
async def test_poison_costs_three_workers(new, fatal_after):
    fleet = await Fleet(new, fatal_after).add_streams(40)
    await fleet.run(5)
    poison = await fleet.add_stream(fatal_after)
    await fleet.run(60)
    assert (fleet.poisoned, poison.deaths) == ([poison], 3)
