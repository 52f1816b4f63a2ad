"""A cell under load on a simulated clock: routers, slots that a sequence holds while it computes, and clients.

The store is the real definition of its functions (`MemoryStore`).
"""

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.request.ids import Incarnation, RequestId, SequenceId, new_operation_id, sequence_id
from octavo.request.record import NewSequence
from octavo.request.sampling import FinishReason
from octavo.store.calls import AcceptReply, AcceptStatus, AppendItem, QueueLimits, TakeReason, TakeRequest, TakeStatus
from octavo.store.memory import MemoryState, MemoryStore
from router.placing.placement import KEPT_SHARE
from router.streaming.session_opener import queue_full

WORKER = Incarnation("worker")
NUM_SLOTS = 64
TOKENS_PER_S = 30  # of each slot
PREFILL_TOKENS_PER_S = 4000
CLAIM_MS = 2000
TAKE_S = 0.003  # between the answer to a pop and its take
DEADLINE_S = 30
MEAN_OUTPUT, MAX_OUTPUT = 120, 512
LIMITS = QueueLimits(max_requests=64, max_tokens=8_000_000)


@dataclass
class Load:
    """What one tenant sends: so many requests at a time (closed), or so many a second, come what may (open)."""

    tenant: str
    at_once: int = 0
    per_s: float = 0
    max_tokens: int = MAX_OUTPUT
    priority: int = 3
    retries: bool = True


@dataclass
class Outcome:
    """What a tenant got."""

    tokens: int = 0  # computed, prompts included, of all that ended after the warm-up
    good_tokens: int = 0  # of answers that were complete in time
    num_done: int = 0
    num_late: int = 0
    num_refused: int = 0
    ttfts: list[float] = field(default_factory=list)

    def ttft(self, share: float) -> float:
        ordered = sorted(self.ttfts)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


@dataclass
class Request:
    """A client's request, which may be sent several times."""

    new: NewSequence
    load: Load
    output: int
    sent_at: float


class Cell:
    """Routers, slots and clients on one simulated clock."""

    def __init__(self, num_routers: int, seed: int, limits: QueueLimits) -> None:
        self.now, self.rng, self.limits = 1e6, random.Random(seed), limits
        self.state = MemoryState(lambda: int(self.now * 1000), retain_ms=0)
        self.routers = [MemoryStore(self.state) for _ in range(num_routers)]
        self.events: list[tuple[float, int, Callable[[], Coroutine[Any, Any, None]]]] = []
        self.numbers = itertools.count()
        self.free_slots = NUM_SLOTS
        self.requests: dict[SequenceId, Request] = {}
        self.outcomes: defaultdict[str, Outcome] = defaultdict(Outcome)
        self.counts_from = self.now
        self.begun = self.now

    def at(self, delay_s: float, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        heapq.heappush(self.events, (self.now + delay_s, next(self.numbers), action))

    async def play(self, loads: Sequence[Load], seconds: float, warm_up_s: float) -> dict[str, Outcome]:
        self.counts_from = self.now + warm_up_s
        stop = self.counts_from + seconds
        for load in loads:
            if load.per_s:
                self.at(self.rng.expovariate(load.per_s), lambda load=load: self.arrive(load))
            for _ in range(load.at_once):
                self.at(self.rng.random() / 10, lambda load=load: self.send(self.request(load)))
        while self.events and self.events[0][0] < stop:
            self.now, _, action = heapq.heappop(self.events)
            await action()
        return dict(self.outcomes)

    async def arrive(self, load: Load) -> None:
        self.at(self.rng.expovariate(load.per_s), lambda: self.arrive(load))
        await self.send(self.request(load))

    def request(self, load: Load) -> Request:
        output = max(8, min(load.max_tokens, MAX_OUTPUT, int(self.rng.expovariate(1 / MEAN_OUTPUT))))
        request_id = RequestId(str(next(self.numbers)))
        new = NewSequence(
            seq_id=sequence_id(load.tenant, request_id), request_id=request_id, body_hash=b"", tenant=load.tenant,
            salt="", model="m", layout="l", sampling=b"", prompt=[0] * self.rng.randrange(100, 900), prompt_chain=0,
            num_branches=1, max_tokens=load.max_tokens, priority=load.priority, deadline_in_ms=0,
            keep_on_disconnect=True, router=Incarnation("router"),
        )  # fmt: skip
        return Request(new, load, output, self.now)

    def outcome(self, request: Request) -> Outcome:
        """Where to count; nothing counts that was sent during the warm-up."""
        return self.outcomes[request.load.tenant] if request.sent_at >= self.counts_from else Outcome()

    async def send(self, request: Request) -> None:
        left_s = DEADLINE_S - (self.now - request.sent_at)
        if left_s <= 0:
            self.outcome(request).num_late += 1
            await self.succeed(request)
            return
        new = replace(request.new, deadline_in_ms=int(left_s * 1000))
        reply = await self.rng.choice(self.routers).accept(new, self.limits)
        if reply.status is AcceptStatus.FULL:
            self.outcome(request).num_refused += 1
            if not request.load.retries:
                return
            self.at(retry_s(reply, self.limits) * self.rng.uniform(0.5, 1.5), lambda: self.send(request))
            return
        self.requests[new.seq_id] = request
        self.at(left_s + 0.001, lambda: self.expire(request))
        await self.dispatch()

    async def expire(self, request: Request) -> None:
        """A sweep ends what waits past its deadline."""
        if request.new.seq_id in self.requests:
            await self.routers[0].sweep(1000, 10**9)
            if self.requests.pop(request.new.seq_id, None) is not None:
                self.outcome(request).num_late += 1
                await self.succeed(request)

    async def succeed(self, request: Request) -> None:
        if request.load.at_once:
            await self.send(self.request(request.load))

    async def dispatch(self) -> None:
        router = self.rng.choice(self.routers)
        while self.free_slots:
            popped = await router.pop("m", 1, CLAIM_MS, self.free_slots, int(KEPT_SHARE * NUM_SLOTS))
            if not popped:
                return
            self.free_slots -= 1
            seq_id = popped[0].record.seq_id
            self.at(TAKE_S * self.rng.uniform(0.5, 1.5), lambda seq_id=seq_id: self.begin(seq_id))

    async def begin(self, seq_id: SequenceId) -> None:
        taken = await self.routers[0].take_ownership(
            TakeRequest(seq_id, 0, WORKER, new_operation_id(), TakeReason.QUEUED)
        )
        request = self.requests.pop(seq_id, None)
        if taken.status is not TakeStatus.OK or request is None:
            self.free_slots += 1
            await self.dispatch()
            return
        first_s = len(request.new.prompt) / PREFILL_TOKENS_PER_S + 1 / TOKENS_PER_S
        self.outcome(request).ttfts.append(self.now + first_s - request.sent_at)
        left_s = DEADLINE_S - (self.now - request.sent_at)
        computed = min(request.output, max(0, int((left_s - first_s) * TOKENS_PER_S)))
        self.at(min(left_s, first_s + computed / TOKENS_PER_S), lambda: self.end(request, computed))

    async def end(self, request: Request, computed: int) -> None:
        reason = FinishReason.STOP if computed == request.output else FinishReason.DEADLINE
        item = AppendItem(request.new.seq_id, 1, 0, 0, [7] * computed, reason)
        await self.routers[0].append_batch(WORKER, [item])
        outcome, size = self.outcome(request), len(request.new.prompt) + computed
        if self.now >= self.counts_from:
            self.outcomes[request.load.tenant].tokens += size
        if reason is FinishReason.STOP:
            outcome.good_tokens += size
            outcome.num_done += 1
        else:
            outcome.num_late += 1
        self.state.get(request.new.seq_id)  # forgets what has ended
        self.free_slots += 1
        await self.dispatch()
        await self.succeed(request)


def retry_s(reply: AcceptReply, limits: QueueLimits) -> float:
    return (queue_full(reply, limits).retry_after_ms or 0) / 1000


def capacity() -> float:
    """Requests per second that the slots can compute."""
    service_s = 500 / PREFILL_TOKENS_PER_S + (1 + MEAN_OUTPUT) / TOKENS_PER_S
    return NUM_SLOTS / service_s
