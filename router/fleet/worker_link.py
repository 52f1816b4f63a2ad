"""This router's link to one worker: the calls, the two streams, and what the worker has said of itself.

A link belongs to one life of a worker process. When its streams break, one probe tells a lost worker from a lost
connection. Who owns the worker's sequences then is decided by the store alone.
"""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from enum import Enum, auto
from functools import partial
from typing import TypeVar, cast

import grpc

from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.net.traces import TRACEPARENT
from octavo.pooling.params import PoolingParams
from octavo.request.ids import BlockHash, Incarnation, SequenceId
from octavo.request.record import AdmissionAnswer, AdmissionOutcome, WorkerRole
from octavo.store.calls import Member
from octavo.v1 import admin_pb2
from octavo.wire.channel import open_worker_channel
from octavo.wire.endpoint import parse_endpoint
from octavo.wire.internal import INTERNAL_REVISION, answer_from_wire, revision_refusal
from octavo.wire.pooling import PromptVector
from octavo.wire.tls import TlsFiles
from router.fleet import progress_calls
from router.fleet.kv_index import KvIndex
from router.fleet.model_registry import ModelRegistry, WorkerFacts
from router.fleet.pending_dispatches import PendingDispatches, ReplayPace
from router.fleet.progress_calls import MigrationReport
from router.fleet.vector_stream import read_vectors
from router.fleet.worker_facts import facts_of
from router.fleet.worker_streams import StepStream, WatchStream
from router.fleet.worker_view import WorkerView
from router.session_registry import SessionRegistry

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")

HELLO_S = 5.0
PROBE_S = 0.5
CANCEL_S = 1.0
KEEP_S = 2.5
MAX_KEPT = 65_536  # hashes of one call
SCHEDULE_S = 2.5  # longer than a usual step; a slower worker counts as one that gave no answer
RECONNECT_S = 0.2
UNUSABLE_S = 5.0  # pause before Hello is sent again to a worker that this router cannot use
# What a router has not read waits in the worker, which joins it, so that a first token waits less long.
UNREAD_BYTES = 64 * 1024
SILENT_S = 2.0  # a worker that sends no report for this long gets no new sequences


class LinkError(Exception):
    """A call to a worker got no answer. The worker may have done what the call asked for, or not."""

    def __init__(self, message: str, *, lost_connection: bool = False) -> None:
        super().__init__(message)
        self.lost_connection = lost_connection  # during the call


class ProbeResult(Enum):
    """What a probe found out about a worker process.

    UNAVAILABLE counts as GONE also where a process sends it: a worker that has had a lease has loaded its model, and
    answers Hello until it has left the store. Only a process that took its place can still be LOADING.
    """

    ALIVE = auto()  # it answers
    GONE = auto()  # it cannot be connected to, or another process answers
    UNKNOWN = auto()  # no answer came in time


class WorkerLink:
    """Lives on the event loop, from the worker's first lease until the worker is lost or has left."""

    def __init__(
        self,
        member: Member,
        router_id: str,
        sessions: SessionRegistry,
        models: ModelRegistry,
        index: KvIndex,
        on_report: Callable[[], None] = lambda: None,
        *,
        tls: TlsFiles | None = None,
    ) -> None:
        described = json.loads(member.info)
        self.incarnation = member.id
        self.worker_id: str = described["worker_id"]
        self.endpoint = str(parse_endpoint(described["endpoint"]))
        self.pid: int = described.get("pid", 0)
        self.lease_s: float = described.get("lease_ms", 0) / 1000
        self.hello: worker_pb2.HelloResponse | None = None
        self.facts: WorkerFacts | None = None
        self.load = admin_pb2.WorkerLoad()
        self.load_at = 0.0
        # Why this router does not use the worker, as Hello and Watch told. Empty: it does.
        self.unusable_reason = "not met yet"
        self.lost = False
        self.has_lease = True
        self.gone = asyncio.Event()  # set while it is lost or has no lease: it may hang, and its connection last
        self.pending_dispatches = PendingDispatches()
        self.traceparent_of: Callable[[SequenceId], str] = lambda seq_id: ""
        self._declined = False  # the last Schedule was answered LATER or not at all, and no report has come since
        self._replaced = False  # another process listens at the worker's endpoint
        self._router_id = router_id
        self._models = models
        self._index = index
        self._on_report = on_report
        self._channel = open_worker_channel(self.endpoint, tls, unread_bytes=UNREAD_BYTES)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self.step_stream = StepStream(self._stub, self.incarnation, router_id, sessions)
        self._watch = WatchStream(self._stub, self.incarnation, index, self._note_load)
        self._replay_pace = ReplayPace()

    # Calls

    async def schedule(self, admission: worker_pb2.Admission, follow: bool) -> AdmissionAnswer:
        """Asks the worker to run a sequence, and with `follow` for its items. Raises LinkError when no answer came."""
        seq_id, router_id = SequenceId(admission.seq_id), self._router_id if follow else ""
        request = worker_pb2.ScheduleRequest(router_id=router_id, admissions=[admission])
        try:
            response = await self._call(self._traced_schedule(seq_id), request, SCHEDULE_S)
        except grpc.aio.AioRpcError as error:
            self._declined = True
            lost = error.code() is grpc.StatusCode.UNAVAILABLE
            what = f"worker {self.worker_id}: Schedule: {error.code().name}"
            raise LinkError(what, lost_connection=lost) from error
        answer = answer_from_wire(response.results[0])
        if answer.admitted:
            self.pending_dispatches.mark_admitted(seq_id)
        self._declined |= answer.outcome is AdmissionOutcome.LATER and not answer.awaits_adapter
        return answer

    def _traced_schedule(self, seq_id: SequenceId) -> Callable[..., Awaitable[worker_pb2.ScheduleResponse]]:
        """Schedule, with the trace of the sequence if it has one."""
        if traceparent := self.traceparent_of(seq_id):
            return partial(self._stub.Schedule, metadata=((TRACEPARENT, traceparent),))
        return cast("Callable[..., Awaitable[worker_pb2.ScheduleResponse]]", self._stub.Schedule)

    def pool(
        self,
        prompts: Sequence[Sequence[int]],
        params: PoolingParams,
        *,
        salt: str,
        priority: int,
        deadline_in_ms: int,
    ) -> AsyncGenerator[list[PromptVector], None]:
        """Has the worker make vectors of prompts, as they come. Raises the ServingError of the call, or Unreachable."""
        method, name = self._stub.Pool, self.worker_id
        return read_vectors(method, name, prompts, params, salt=salt, priority=priority, deadline_in_ms=deadline_in_ms)

    async def keep(self, hashes: Sequence[BlockHash]) -> worker_pb2.KeepResponse:
        """Says which blocks the worker is to keep in its prefix cache. Raises LinkError when no answer came."""
        request = worker_pb2.KeepRequest(router_id=self._router_id, hashes=hashes[:MAX_KEPT])
        try:
            return await self._call(self._stub.Keep, request, KEEP_S)
        except grpc.aio.AioRpcError as error:
            raise LinkError(f"worker {self.worker_id}: Keep: {error.code().name}") from error

    async def wait_to_replay(self, num_tokens: int) -> None:
        """Waits until the worker may be sent a replay of so many tokens."""
        load, burst = self.load, self.facts.max_batch_tokens if self.facts else 0
        idle, speed = load.num_running + load.num_waiting + load.num_swapped == 0, load.prefill_tokens_per_s
        delay_s = self._replay_pace.book_replay(
            time.monotonic(), num_tokens, idle=idle, tokens_per_s=speed, burst_tokens=burst
        )
        if delay_s:
            await asyncio.sleep(delay_s)

    async def cancel_sequence(self, seq_id: SequenceId, epoch: int) -> None:
        """Asks the worker to stop a sequence. The call may fail unnoticed: what counts is the end in the store."""
        request = worker_pb2.WorkerCancelRequest(sequences=[worker_pb2.SequenceEpoch(seq_id=seq_id, epoch=epoch)])
        try:
            await self._call(self._stub.Cancel, request, CANCEL_S)
        except (grpc.aio.AioRpcError, LinkError) as error:
            log.debug("worker %s: Cancel: %s", self.worker_id, error)

    def drain(self, grace_ms: int, *, undo: bool) -> AsyncGenerator[worker_pb2.DrainResponse, None]:
        """Has the worker drain, or end its drain, and passes on its progress. Raises the ServingError of the call."""
        if self.lost:
            raise progress_calls.gone(self.worker_id)
        request = worker_pb2.DrainRequest(grace_ms=grace_ms, undo=undo)
        return progress_calls.read_progress(self._stub.Drain, request, self.worker_id)

    async def migrate(
        self, seq_id: SequenceId, epoch: int, target: Incarnation, *, during_prefill: bool = False
    ) -> MigrationReport:
        """Has the worker move a sequence to the target, and waits until the migration is over, which outlives the call.

        With `during_prefill` it begins before the prompt is computed. If the sequence is migrating already, the call
        waits for that migration, whichever its target is. Raises the ServingError of the call.
        """
        if self.lost:
            raise progress_calls.gone(self.worker_id)
        request = worker_pb2.WorkerMigrateRequest(
            seq_id=seq_id, epoch=epoch, target=target, during_prefill=during_prefill
        )
        return await progress_calls.read_report(self._stub.Migrate, request, self.worker_id)

    async def probe(self) -> ProbeResult:
        """Finds out whether the worker process lives, by one Hello."""
        try:
            hello = await self._call(self._stub.Hello, self._hello_request(), PROBE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return ProbeResult.UNKNOWN
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                return ProbeResult.GONE
            return ProbeResult.ALIVE  # only a living process sends any other status
        except LinkError:
            return ProbeResult.GONE
        return ProbeResult.ALIVE if hello.incarnation == self.incarnation else ProbeResult.GONE

    async def _call(self, method: Callable[..., Awaitable[Reply]], request: object, timeout_s: float) -> Reply:
        """Raises LinkError when this link is closed, before the call or during it: its worker is lost."""
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.UsageError as error:
            raise LinkError(f"worker {self.worker_id} is lost") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise LinkError(f"worker {self.worker_id} is lost") from error  # the call was cancelled, and not this task

    # State

    @property
    def role(self) -> WorkerRole:
        """What the worker is for, as far as it has said."""
        return self.facts.role if self.facts else WorkerRole.BOTH

    @property
    def numerics(self) -> str:
        """The worker's class of numerics, as far as it has said."""
        return self.facts.numerics if self.facts else ""

    def view(self) -> WorkerView:
        """A snapshot for placement."""
        load, facts, reason = self.load, self.facts, self._reason_unavailable()
        return WorkerView(
            incarnation=self.incarnation,
            worker_id=self.worker_id,
            available=not reason,
            reason_unavailable=reason,
            queued_tokens=load.num_prefill_tokens,
            num_running=load.num_running,
            num_waiting=load.num_waiting + load.num_swapped,
            dispatched_tokens=self.pending_dispatches.num_tokens,
            num_dispatched=self.pending_dispatches.num_sequences,
            num_free_blocks=load.num_free_blocks,
            num_cached_blocks=load.num_cached_blocks,
            num_blocks=facts.num_blocks if facts else 0,
            block_size=facts.block_size if facts else 1,
            max_batch_sequences=facts.max_batch_sequences if facts else 1,
            context_tokens=facts.context_tokens if facts else 0,
            max_sequence_blocks=facts.max_sequence_blocks if facts else 0,
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            recent_picks=self.pending_dispatches.num_recent,
            role=self.role,
            draining=self.load.draining and not (self.lost or self._silence()),
            numerics=self.numerics,
            adapters=self._watch.adapters,
            stays=not (self.lost or self.unusable_reason or self._silence()),
        )

    def _reason_unavailable(self) -> str:
        """Why the worker gets no new sequences. Empty if it does. A worker process may live while its engine hangs."""
        if self.lost or self.unusable_reason or self.facts is None:
            return self.unusable_reason or ("lost" if self.lost else "not met yet")
        if silence := self._silence():
            return silence
        return "had no room or did not answer its last Schedule; until its next report" if self._declined else ""

    def _silence(self) -> str:
        """Why the worker may not be there. Empty if it has said lately that it is."""
        if not self.step_stream.connected:
            return "its streams are not open"
        if not self.has_lease:
            return "its lease has ended: it hangs, has stopped, or cannot reach the store"
        silent_s = time.monotonic() - self.load_at
        return f"silent for {silent_s:.0f} s" if silent_s > SILENT_S else ""

    # Life

    async def keep_open(self, on_broken: Callable[["WorkerLink"], Awaitable[None]]) -> None:
        """Keeps both streams open until the worker is lost. After each break, `on_broken` finds out whether it is."""
        while not self.lost:
            try:
                met = await self._say_hello()
                if met:
                    await self._read_streams()
                    self.unusable_reason = "its streams broke"
                if self.facts or self._replaced:
                    await on_broken(self)
                await asyncio.sleep(RECONNECT_S if met or not self.hello else UNUSABLE_S)
            except Exception:
                log.exception("worker %s: its link failed", self.worker_id)
                await asyncio.sleep(UNUSABLE_S)

    def note_lease(self, *, present: bool) -> None:
        self.has_lease = present
        (self.gone.clear if present and not self.lost else self.gone.set)()

    def mark_lost(self) -> None:
        """The worker process has died: this link is not opened again, and the worker's cache is forgotten."""
        self.lost = True
        self.gone.set()
        self._index.forget_worker(self.incarnation)

    async def close(self) -> None:
        """Ends the link for good. Whoever waits for an answer of the worker gets a LinkError."""
        self.mark_lost()
        self._models.remove_worker(self.incarnation)
        await self._channel.close()

    def _hello_request(self) -> worker_pb2.HelloRequest:
        return worker_pb2.HelloRequest(router_id=self._router_id, internal_revision=INTERNAL_REVISION)

    async def _say_hello(self) -> bool:
        """Says Hello. Returns whether the worker is this link's process, and fits; otherwise sets `unusable_reason`."""
        try:
            hello = await self._stub.Hello(self._hello_request(), timeout=HELLO_S)
        except grpc.aio.AioRpcError as error:
            self.unusable_reason = f"does not answer: {error.code().name}"
            return False
        self._replaced = hello.incarnation != self.incarnation
        if self._replaced:
            self.unusable_reason = "another process listens at its endpoint"
            return False
        self.hello = hello
        if reason := revision_refusal(hello.internal_revision):
            self.unusable_reason = reason
            return False
        facts = facts_of(hello)
        if mismatch := await self._models.add_worker(facts):
            if mismatch != self.unusable_reason:
                log.error("worker %s is not used: %s", self.worker_id, mismatch)
            self.unusable_reason = mismatch
            return False
        self.facts = facts
        return True

    async def _read_streams(self) -> None:
        """Returns when either stream has broken."""
        tasks = [asyncio.create_task(self._watch.read_reports()), asyncio.create_task(self.step_stream.read_items())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, grpc.aio.AioRpcError):
                    log.error("worker %s: stream failed", self.worker_id, exc_info=outcome)

    def _note_load(self, load: admin_pb2.WorkerLoad) -> None:
        self.load, self.load_at = load, time.monotonic()
        self.pending_dispatches.remove_reported()
        self.unusable_reason = "draining" if load.draining else ""
        self._declined = False
        self._on_report()
