"""One process of a simulated cell: routers and workers that call the store as the real ones do, and compute nothing.

Time is simulated: it runs `stretch` times slower than the clock, for the store's functions, too, so that a small
machine can play a large cell. Calls and their latencies are counted per function.
"""

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from gpu_worker.serving.admission.reconciler import ROUND_S
from octavo.request.ids import Incarnation, RequestId, SequenceId, new_operation_id, sequence_id
from octavo.request.record import NewSequence, Snapshot
from octavo.request.sampling import FinishReason
from octavo.store.calls import (
    AppendItem,
    AppendStatus,
    Finish,
    Member,
    QueueLimits,
    TakeReason,
    TakeRequest,
    TakeStatus,
)
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions
from router.fleet.worker_pool import DISCOVER_S
from router.health_monitor import INTERVAL_S
from router.placing.dispatcher import (
    CLAIM_MS,
    IDLE_POLL_S,
    POP_AT_ONCE,
    RECOVERIES_AT_ONCE,
    SWEEP_INTERVAL_MS,
    SWEEP_LIMIT,
    SWEEP_S,
)

LEASE_MS = 3000
GRACE_MS = 10_000
STEPS_PER_S = 30
MODEL = "m" * 32
PROMPT_TOKENS = 200
SHORTEST_S, LONGEST_S = 10, 30  # how long a stream lasts
STOPPED_SHARE = 0.25  # streams whose end a router finds: a stop string
PLENTY = QueueLimits(10**7, 10**12)
ACCEPTED = (AppendStatus.OK, AppendStatus.OK_CANCEL, AppendStatus.DUP)


@dataclass(frozen=True)
class CellPlan:
    """What a process of the cell plays."""

    url: str
    source: str
    stretch: float
    site: int
    num_routers: int
    worker_shares: tuple[float, ...]  # how many streams each worker runs
    tokens_per_append: int


@dataclass
class Usage:
    """How often each function was called, how long the calls took, and how many tokens were appended."""

    calls: Counter[str] = field(default_factory=Counter)
    latencies: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    tokens: int = 0
    items: int = 0
    refused: int = 0  # replies that a healthy cell never gives


@dataclass(slots=True)
class SimulatedStream:
    """A stream on a worker."""

    seq_id: SequenceId
    epoch: int
    end: int  # how many tokens it gets
    done: int = 0  # tokens in the journal
    computed: int = 0


class SimulatedWorker:
    """A worker: one append per step for all its streams, and heartbeats."""

    def __init__(self, site: "Site", share: float) -> None:
        self.site, self.share = site, share
        self.member = Member("worker", Incarnation(f"w{random.getrandbits(60):015x}"), b"{}" * 200)
        self.streams: dict[SequenceId, SimulatedStream] = {}
        self.tasks: list[asyncio.Task[None]] = []
        self.num_held = 0  # steps since the last append of all streams

    async def heartbeat(self) -> None:
        await self.site.store.heartbeat(self.member, LEASE_MS)
        await self.site.sleep(LEASE_MS / 3000)

    async def reconcile(self) -> None:
        await self.site.store.owned(self.member.id, list(self.streams))
        await self.site.sleep(ROUND_S)

    async def step(self) -> None:
        """One step after the other; a step that is late is made up for, as the deltas of a real engine gather."""
        site = self.site
        started, steps = site.now() + random.random() / STEPS_PER_S, 0
        while True:
            await site.until(started + steps / STEPS_PER_S)
            if site.running.is_set():
                for stream in self.streams.values():
                    stream.computed = min(stream.computed + 1, stream.end)
                await self.append()
                steps += 1
            else:
                await site.running.wait()
                started, steps = site.now(), 0

    async def append(self) -> None:
        """Appends as JournalWriter does: the tokens of a few steps together, first ones and ends at once."""
        self.num_held += 1
        due = self.num_held >= self.site.plan.tokens_per_append
        if due:
            self.num_held = 0
        items, ended = [], []
        for stream in self.streams.values():
            new = stream.computed - stream.done
            if new and (due or stream.done == 0 or stream.computed == stream.end):
                stops = stream.computed == stream.end
                by_router = stops and random.random() < STOPPED_SHARE
                reason = FinishReason.LENGTH if stops and not by_router else FinishReason.NONE
                items.append(AppendItem(stream.seq_id, stream.epoch, 0, stream.done, [7] * new, reason))
                stream.done = stream.computed
                if stops:
                    ended.append((stream, by_router))
        if not items:
            return
        for item, reply in zip(items, await self.site.store.append_batch(self.member.id, items), strict=True):
            self.site.usage.refused += reply.status not in ACCEPTED
            self.site.usage.tokens += len(item.token_ids)
        self.site.usage.items += len(items)
        for stream, by_router in ended:
            self.streams.pop(stream.seq_id, None)
            if by_router:
                self.site.spawn(
                    self.site.store.finish(Finish(stream.seq_id, FinishReason.STOP, 0, max(1, stream.end - 1)))
                )


class SimulatedRouter:
    """A router: accepts, pops and takes; keeps its lease; sweeps; reads members, notices, and its sessions' records."""

    def __init__(self, site: "Site") -> None:
        self.site = site
        self.store = site.open_store()
        self.id = Incarnation(f"r{random.getrandbits(60):015x}")
        self.member = Member("router", self.id, b"{}" * 100)
        self.sessions: dict[SequenceId, None] = {}
        self.wake = asyncio.Event()

    async def heartbeat(self) -> None:
        await self.store.heartbeat(self.member, LEASE_MS)
        await self.site.sleep(LEASE_MS / 3000)

    async def discover(self) -> None:
        await self.store.members("worker")
        await self.site.sleep(DISCOVER_S)

    async def health(self) -> None:
        await self.store.accepting()
        await self.site.sleep(INTERVAL_S)

    async def sweep(self) -> None:
        await self.site.sleep(SWEEP_S * random.uniform(0.5, 1.5))
        await self.store.sweep(SWEEP_LIMIT, GRACE_MS, SWEEP_INTERVAL_MS)

    async def pop(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(IDLE_POLL_S * self.site.plan.stretch):
                await self.wake.wait()
        self.wake.clear()
        while len(popped := await self.store.pop(MODEL, POP_AT_ONCE, CLAIM_MS)) == POP_AT_ONCE:
            self.place(popped)
        self.place(popped)

    def place(self, popped: list[Snapshot]) -> None:
        for item in popped:
            self.site.spawn(self.take(item, TakeReason.QUEUED))

    async def retake(self, seq_id: SequenceId, epoch: int) -> None:
        snapshot = await self.store.read(seq_id, prompt=True, from_indexes=[0] * 16)
        if snapshot is not None and snapshot.record.epoch == epoch and not snapshot.record.state.ended:
            await self.take(snapshot, TakeReason.CONNECTION)

    async def take(self, snapshot: Snapshot, reason: TakeReason) -> None:
        site, seq_id = self.site, snapshot.record.seq_id
        worker = min(site.workers, key=lambda worker: len(worker.streams) / worker.share)
        reply = await self.store.take_ownership(
            TakeRequest(seq_id, snapshot.record.epoch, worker.member.id, new_operation_id(), reason)
        )
        if reply.status is TakeStatus.OK:
            done = snapshot.record.num_tokens[0]
            worker.streams[seq_id] = SimulatedStream(seq_id, reply.epoch, snapshot.record.max_tokens, done, done)

    async def listen(self) -> None:
        async for notice in self.store.notices(self.id):
            if notice.what == "queued":
                self.wake.set()
            elif notice.what == "ended":
                self.sessions.pop(notice.seq_id, None)

    async def accept(self, seconds: float) -> None:
        """Accepts a request for a stream of so many seconds."""
        request_id = RequestId(f"q-{random.getrandbits(96):024x}")
        prompt = [random.getrandbits(15)] * PROMPT_TOKENS
        max_tokens = max(2, int(seconds * STEPS_PER_S))
        new = NewSequence(
            seq_id=sequence_id("bench", request_id), request_id=request_id, body_hash=b"b" * 16, tenant="bench",
            salt="", model=MODEL, layout="l" * 32, sampling=b"s" * 40, prompt=prompt, prompt_chain=0,
            num_branches=1, max_tokens=max_tokens, priority=2, deadline_in_ms=600_000, keep_on_disconnect=False,
            router=self.id,
        )  # fmt: skip
        self.sessions[new.seq_id] = None
        await self.store.accept(new, PLENTY)
        self.wake.set()

    async def accept_on(self) -> None:
        """Accepts as many requests as streams end."""
        streams = sum(worker.share for worker in self.site.workers)
        rate = streams / ((SHORTEST_S + LONGEST_S) / 2) / len(self.site.routers)
        await self.site.sleep(random.expovariate(rate))
        self.site.spawn(self.accept(random.uniform(SHORTEST_S, LONGEST_S)))

    async def recover(self, owner: Incarnation) -> None:
        """What a router does when it sees a worker die."""
        owned = await self.store.owned(owner)
        limit = asyncio.Semaphore(RECOVERIES_AT_ONCE)

        async def one(seq_id: SequenceId, epoch: int) -> None:
            async with limit:
                await self.retake(seq_id, epoch)

        await asyncio.gather(*(one(sequence.seq_id, sequence.epoch) for sequence in owned))


class Site:
    """The routers and workers of one process. Its workers share one connection pool; each router has its own."""

    def __init__(self, plan: CellPlan) -> None:
        self.plan = plan
        self.usage = Usage()
        self.store = self.open_store()  # of the workers
        self.running = asyncio.Event()
        self.workers = [SimulatedWorker(self, share) for share in plan.worker_shares]
        self.routers = [SimulatedRouter(self) for _ in range(plan.num_routers)]
        self._loops: list[asyncio.Task[None]] = []
        self._spawned: set[asyncio.Task[Any]] = set()

    def open_store(self) -> RedisStore:
        store = RedisStore(
            self.plan.url, RedisOptions(connect_timeout_s=60, call_timeout_s=60), source=self.plan.source
        )
        store._call = self._counted(store.server.call)
        return store

    def now(self) -> float:
        return time.monotonic() / self.plan.stretch

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds * self.plan.stretch)

    async def until(self, at: float) -> None:
        await self.sleep(max(0.0, at - self.now()))

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._spawned.add(task)
        task.add_done_callback(self._spawned.discard)

    async def settled(self) -> None:
        """Returns when the calls have ended that no loop waits for, and each loop has had the time to stop."""
        await asyncio.sleep(0.5)
        while self._spawned:
            await asyncio.gather(*self._spawned)

    def _counted(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def counted(name: str, *args: Any, **options: Any) -> Any:
            began = time.perf_counter()
            reply = await call(name, *args, **options)
            self.usage.calls[name] += 1
            self.usage.latencies[name].append(time.perf_counter() - began)
            return reply

        return counted

    async def fill(self) -> None:
        """Starts as many streams as the workers run, each somewhere in its life."""
        await self.store.open()
        for each in (*self.workers, *self.routers):
            await self.store.heartbeat(each.member, LEASE_MS * 100)
        missing = round(sum(worker.share for worker in self.workers))
        while missing:
            count = min(missing, 32)
            await asyncio.gather(
                *(random.choice(self.routers).accept(random.uniform(1, LONGEST_S)) for _ in range(count))
            )
            missing -= count
            self.routers[0].place(await self.store.pop(MODEL, 2 * count, CLAIM_MS))
            await self.settled()
        while popped := await self.store.pop(MODEL, 64, CLAIM_MS):
            self.routers[0].place(popped)
            await self.settled()

    def start(self) -> None:
        """Starts the loops."""
        for worker in self.workers:
            worker.tasks = [
                self._loop(worker.heartbeat),
                self._loop(worker.reconcile),
                asyncio.create_task(worker.step()),
            ]
        for router in self.routers:
            for loop in (router.heartbeat, router.discover, router.health, router.sweep, router.pop, router.accept_on):
                self._loop(loop)
            self._loops.append(asyncio.create_task(router.listen()))

    def _loop(self, body: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        async def run() -> None:
            await self.sleep(random.random() * 0.2)
            while True:
                await self.running.wait()
                await body()

        task = asyncio.create_task(run())
        self._loops.append(task)
        return task

    async def lose(self, index: int) -> tuple[Incarnation, int]:
        """The worker dies: nothing more is appended or renewed. Returns its id and how many streams it ran."""
        worker = self.workers.pop(index)
        for task in worker.tasks:
            task.cancel()
        await asyncio.gather(*worker.tasks, return_exceptions=True)
        return worker.member.id, len(worker.streams)

    async def recover(self, owner: Incarnation) -> None:
        await asyncio.gather(*(router.recover(owner) for router in self.routers))


def play(plan: CellPlan, pipe: Any) -> None:
    """The process: does what the pipe says, one command after the other, and answers each."""
    import uvloop

    uvloop.run(_play(plan, pipe))


async def _play(plan: CellPlan, pipe: Any) -> None:
    site = Site(plan)
    loop = asyncio.get_running_loop()
    while True:
        name, *args = await loop.run_in_executor(None, pipe.recv)
        reply: object = None
        if name == "fill":
            await site.fill()
        elif name == "start":
            site.start()
            site.running.set()
        elif name == "pause":
            site.running.clear()
            await site.settled()
        elif name == "usage":
            reply, site.usage = site.usage, Usage()
        elif name == "lose":
            reply = await site.lose(*args)
        elif name == "recover":
            await site.recover(*args)
        elif name == "end":
            pipe.send(None)
            return
        pipe.send(reply)
