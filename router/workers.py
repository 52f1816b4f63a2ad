"""The workers as this router sees them: found through the store, met by Hello, watched for load and cache, stepped.

A link is one worker process life. When its streams break, one probe tells a lost worker from a lost connection; the
store decides everything else.
"""

import asyncio
import json
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc

from octavo import rpc, wire
from octavo.errors import Failure, ServingError, StoreUnavailable
from octavo.ids import Incarnation, SequenceId
from octavo.record import Member
from octavo.sampling import SamplingParams
from octavo.store.base import Store
from octavo.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from router.dispatched import Dispatched
from router.hub import Hub
from router.kv_index import Applied, KvChange, KvEvent, KvIndex
from router.models import Models, WorkerHello
from router.placement import WorkerView

log = logging.getLogger(__name__)

DISCOVER_S = 0.5
PROBE_S = 0.5
SCHEDULE_S = 2.5  # longer than any step; a worker that hangs costs its new sequences this much
RECONNECT_S = 0.2
WATCH_MS = 250
SILENT_S = 2.0  # a worker that reports nothing for so long gets nothing new
PICKS_REMEMBERED_S = 5.0
KV_CHANGES = {"stored": KvChange.STORED, "removed": KvChange.REMOVED, "cleared": KvChange.CLEARED}


class Outcome(Enum):
    """A worker's answer to an admission."""

    ADMITTED = worker_pb2.ADMISSION_OUTCOME_ADMITTED
    LATER = worker_pb2.ADMISSION_OUTCOME_LATER
    NEVER = worker_pb2.ADMISSION_OUTCOME_NEVER
    REJECTED = worker_pb2.ADMISSION_OUTCOME_REJECTED
    STALE_EPOCH = worker_pb2.ADMISSION_OUTCOME_STALE_EPOCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What a worker is asked to run; see worker.proto."""

    seq_id: SequenceId
    epoch: int
    prompt: Sequence[int]
    outputs: Sequence[Sequence[int]]
    finished_branches: Sequence[int]
    sampling: SamplingParams
    salt: str
    priority: int
    deadline_in_ms: int
    alone: bool


class LinkBroken(ServingError):
    """A call to a worker failed on the way; it may or may not have been done."""


class WorkerLink:
    """One worker process life. All methods are for the event loop."""

    def __init__(
        self,
        member: Member,
        router_id: str,
        hub: Hub,
        models: Models,
        index: KvIndex,
        on_report: Callable[[], None] = lambda: None,
    ) -> None:
        described = json.loads(member.info)
        self.incarnation = member.id
        self.worker_id: str = described["worker_id"]
        self.endpoint: str = described["endpoint"]
        self.pid: int = described.get("pid", 0)
        self.hello: worker_pb2.HelloResponse | None = None
        self.facts: WorkerHello | None = None
        self.load = worker_pb2.Load()
        self.load_at = 0.0
        self.reason = "not met yet"  # why it is not available; empty when it is
        self.connected = False  # the Step stream is open
        self.lost = False
        self.has_lease = True
        self._router_id = router_id
        self._hub = hub
        self._models = models
        self._index = index
        self._on_report = on_report
        self._channel = rpc.channel(self.endpoint, internal=True)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self._commands: asyncio.Queue[worker_pb2.StepRequest] = asyncio.Queue()
        self._followed: set[SequenceId] = set()
        self.dispatched = Dispatched()
        self._picks: list[float] = []

    # What the router asks of a worker

    async def schedule(self, admission: Admission) -> tuple[Outcome, Failure | None]:
        """Raises LinkBroken when no answer came. An admitted sequence is followed on the Step stream."""
        seq_id = admission.seq_id
        self._followed.add(seq_id)
        request = worker_pb2.ScheduleRequest(router_id=self._router_id, admissions=[admission_to_wire(admission)])
        try:
            response = await self._stub.Schedule(request, timeout=SCHEDULE_S)
        except grpc.aio.AioRpcError as error:
            self.dispatched.refused(seq_id)
            raise LinkBroken(f"worker {self.worker_id}: Schedule: {error.code().name}") from error
        result = response.results[0]
        if result.outcome == worker_pb2.ADMISSION_OUTCOME_ADMITTED:
            self.dispatched.admitted(seq_id)
        else:
            self.dispatched.refused(seq_id)
        failure = wire.failure_from_wire(result.failure) if result.HasField("failure") else None
        return Outcome(result.outcome), failure

    def picked(self, seq_id: SequenceId, num_tokens: int) -> None:
        """Work sent since the last load report counts at once, so that a burst spreads."""
        self.dispatched.sent(seq_id, num_tokens)
        self._picks.append(time.monotonic())

    def follow(self, seq_id: SequenceId, next_indexes: Sequence[int]) -> None:
        self._followed.add(seq_id)
        follow = worker_pb2.Follow(seq_id=seq_id, next_indexes=next_indexes)
        self._commands.put_nowait(worker_pb2.StepRequest(follow=follow))

    def unfollow(self, seq_id: SequenceId) -> None:
        if seq_id in self._followed:
            self._followed.discard(seq_id)
            self._commands.put_nowait(worker_pb2.StepRequest(unfollow=worker_pb2.Unfollow(seq_id=seq_id)))

    async def cancel(self, seq_id: SequenceId, epoch: int) -> None:
        """Best effort: the record's cancel flag is what counts."""
        request = worker_pb2.WorkerCancelRequest(sequences=[worker_pb2.SequenceEpoch(seq_id=seq_id, epoch=epoch)])
        try:
            await self._stub.Cancel(request, timeout=1.0)
        except grpc.aio.AioRpcError as error:
            log.debug("worker %s: Cancel: %s", self.worker_id, error.code().name)

    async def probe(self) -> bool | None:
        """True: it lives. False: nobody listens, or somebody else. None: no answer in time, so nobody knows."""
        try:
            hello = await self._stub.Hello(self._hello_request(), timeout=PROBE_S)
        except grpc.aio.AioRpcError as error:
            return None if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED else False
        return bool(hello.incarnation == self.incarnation)

    def view(self) -> WorkerView:
        """A snapshot for placement."""
        now = time.monotonic()
        self._picks = [when for when in self._picks if now - when < PICKS_REMEMBERED_S]
        load, facts, reason = self.load, self.facts, self._reason(now)
        return WorkerView(
            incarnation=self.incarnation,
            worker_id=self.worker_id,
            available=not reason,
            reason_unavailable=reason,
            queued_tokens=load.num_prefill_tokens,
            num_running=load.num_running,
            num_waiting=load.num_waiting + load.num_swapped,
            dispatched_tokens=self.dispatched.num_tokens,
            num_dispatched=self.dispatched.num_sequences,
            num_free_blocks=load.num_free_blocks,
            num_cached_blocks=load.num_cached_blocks,
            num_blocks=facts.num_blocks if facts else 0,
            block_size=facts.block_size if facts else 1,
            max_batch_sequences=facts.max_batch_sequences if facts else 1,
            context_tokens=facts.context_tokens if facts else 0,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            recent_picks=len(self._picks),
        )

    def _reason(self, now: float) -> str:
        """Why nothing is to be placed there; empty if it may be. Its process may live while its engine hangs."""
        if self.reason or self.facts is None:
            return self.reason or "not met yet"
        if not self.connected:
            return "its streams are not open"
        if not self.has_lease:
            return "its lease has ended: its engine makes no progress"
        return f"silent for {now - self.load_at:.0f} s" if now - self.load_at > SILENT_S else ""

    # Its life

    async def run(self, on_broken: Callable[["WorkerLink"], Awaitable[None]]) -> None:
        """Meets the worker and keeps both streams open until it is lost."""
        while not self.lost:
            if await self._meet():
                await self._streams()
                self.connected = False
                self.reason = "its streams broke"
                await on_broken(self)
            await asyncio.sleep(RECONNECT_S)

    async def close(self) -> None:
        self.lost = True
        self._index.drop(self.incarnation)
        self._models.leave(self.incarnation)
        await self._channel.close()

    def _hello_request(self) -> worker_pb2.HelloRequest:
        return worker_pb2.HelloRequest(router_id=self._router_id, schema_revision=wire.SCHEMA_REVISION)

    async def _meet(self) -> bool:
        try:
            hello = await self._stub.Hello(self._hello_request(), timeout=5.0)
        except grpc.aio.AioRpcError as error:
            self.reason = f"does not answer: {error.code().name}"
            return False
        if hello.incarnation != self.incarnation:
            self.reason = "another process listens at its endpoint"
            self.lost = True
            return False
        if hello.schema_revision != wire.SCHEMA_REVISION:
            self.reason = f"speaks schema {hello.schema_revision}, this router {wire.SCHEMA_REVISION}"
            return False
        self.hello, self.facts = hello, facts_of(hello)
        self.reason = await self._models.meet(self.facts) or self.reason
        return self._models.find(hello.model).workers.issuperset({self.incarnation})

    async def _streams(self) -> None:
        """Returns when either stream has broken."""
        tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._step())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, grpc.aio.AioRpcError):
                    log.error("worker %s: stream failed", self.worker_id, exc_info=outcome)

    async def _watch(self) -> None:
        async for message in self._stub.Watch(worker_pb2.WatchRequest(interval_ms=WATCH_MS)):
            self.load, self.load_at = message.load, time.monotonic()
            self.dispatched.reported()
            self.reason = "draining" if message.load.draining else ""
            self._on_report()
            if not self._update_index(message):
                return  # a gap: a new stream brings a new snapshot

    def _update_index(self, message: worker_pb2.WatchResponse) -> bool:
        if message.HasField("snapshot"):
            snapshot = message.snapshot
            self._index.apply_snapshot(
                self.incarnation, snapshot.device_hashes, snapshot.host_hashes, message.event_seq
            )
            return True
        events = [
            KvEvent(KV_CHANGES[event.WhichOneof("event")], event.stored or event.removed) for event in message.events
        ]
        return self._index.apply(self.incarnation, events, message.event_seq, message.digest) is Applied.OK

    async def _step(self) -> None:
        call = self._stub.Step()
        await call.write(worker_pb2.StepRequest(open=worker_pb2.Open(router_id=self._router_id)))
        await call.write(worker_pb2.StepRequest(grant=worker_pb2.Grant(steps=0)))
        writer = asyncio.create_task(self._write_commands(call))
        try:
            self.connected = True
            self._hub.check(self._followed)  # after a reconnect each session says where it is
            while (result := await call.read()) is not grpc.aio.EOF:
                for item in result.items:
                    seq_id = SequenceId(item.seq_id)
                    if not self._hub.deliver(seq_id, item):
                        self.unfollow(seq_id)
                self._hub.check(map(SequenceId, result.unknown_seq_ids))
        finally:
            writer.cancel()
            call.cancel()

    async def _write_commands(self, call: Any) -> None:
        while True:
            await call.write(await self._commands.get())


class WorkerPool:
    """All links, kept in step with the store's members."""

    def __init__(
        self,
        store: Store,
        router_id: Incarnation,
        hub: Hub,
        models: Models,
        on_lost: Callable[[Incarnation], Awaitable[None]],
        on_report: Callable[[], None],
    ) -> None:
        self.index = KvIndex()
        self.links: dict[Incarnation, WorkerLink] = {}
        self._store = store
        self._router_id = router_id
        self._hub = hub
        self._models = models
        self._on_lost = on_lost
        self._on_report = on_report
        self._tasks: dict[Incarnation, asyncio.Task[None]] = {}
        self._known_lost: OrderedDict[Incarnation, None] = OrderedDict()

    async def run(self) -> None:
        """Finds workers for as long as the router lives."""
        while True:
            try:
                members = await self._store.members("worker")
            except StoreUnavailable:
                members = None
            if members is not None:
                self._meet_new(members)
                await self._part_with_gone({member.id for member in members})
            await asyncio.sleep(DISCOVER_S)

    def find(self, incarnation: Incarnation) -> WorkerLink | None:
        return self.links.get(incarnation)

    def lost(self, incarnation: Incarnation) -> bool:
        """Whether this router has seen that process die."""
        return incarnation in self._known_lost

    def views(self, fingerprint: str) -> list[WorkerView]:
        return [link.view() for link in self.links.values() if link.facts and link.facts.fingerprint == fingerprint]

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        for link in self.links.values():
            await link.close()

    def _meet_new(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.id not in self.links and member.id not in self._known_lost:
                link = WorkerLink(member, self._router_id, self._hub, self._models, self.index, self._on_report)
                log.info("met worker %s at %s (%s)", link.worker_id, link.endpoint, link.incarnation)
                self.links[member.id] = link
                self._tasks[member.id] = asyncio.create_task(link.run(self._broken))

    async def _part_with_gone(self, present: set[Incarnation]) -> None:
        for link in self.links.values():
            link.has_lease = link.incarnation in present
        for incarnation in [id for id, link in self.links.items() if id not in present and not link.connected]:
            await self._part(incarnation)

    async def _broken(self, link: WorkerLink) -> None:
        if link.lost or await link.probe() is False:
            log.warning("worker %s (%s) is lost", link.worker_id, link.incarnation)
            self._known_lost[link.incarnation] = None
            while len(self._known_lost) > 1024:
                self._known_lost.popitem(last=False)
            await self._on_lost(link.incarnation)
            link.lost = True

    async def _part(self, incarnation: Incarnation) -> None:
        task = self._tasks.pop(incarnation, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.links.pop(incarnation).close()


def facts_of(hello: worker_pb2.HelloResponse) -> WorkerHello:
    return WorkerHello(
        worker_id=hello.worker_id,
        incarnation=Incarnation(hello.incarnation),
        model=hello.model,
        fingerprint=hello.model_fingerprint,
        layout=hello.kv_layout,
        block_size=hello.block_size,
        num_blocks=hello.num_blocks,
        context_tokens=hello.context_tokens,
        vocab_size=hello.vocab_size,
        tokenizer=hello.tokenizer,
        eos_token_ids=tuple(hello.eos_token_ids),
        max_batch_tokens=hello.max_batch_tokens,
        max_batch_sequences=hello.max_batch_sequences,
        device=hello.device,
    )


def admission_to_wire(admission: Admission) -> worker_pb2.Admission:
    return worker_pb2.Admission(
        seq_id=admission.seq_id,
        epoch=admission.epoch,
        prompt=types_pb2.TokenIds(ids=admission.prompt),
        outputs=[types_pb2.TokenIds(ids=output) for output in admission.outputs],
        finished_branches=admission.finished_branches,
        sampling=wire.sampling_to_wire(admission.sampling),
        salt=admission.salt,
        priority=admission.priority,
        deadline_in_ms=admission.deadline_in_ms,
        alone=admission.alone,
    )
