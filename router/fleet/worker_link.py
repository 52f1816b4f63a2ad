"""A worker as this router sees it: met by Hello, watched for load and cache, stepped, asked to run sequences.

A link is one worker process life. When its streams break, one probe tells a lost worker from a lost connection; the
store decides everything else.
"""

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc

from octavo import rpc, wire
from octavo.errors import Failure
from octavo.ids import Incarnation, SequenceId
from octavo.store.calls import Member
from octavo.v1 import worker_pb2, worker_pb2_grpc
from router.fleet.admission import Admission, Outcome, admission_to_wire
from router.fleet.kv_index import KvIndex
from router.fleet.model_registry import ModelRegistry, WorkerFacts
from router.fleet.pending_dispatches import PendingDispatches
from router.fleet.replay_pace import ReplayPace
from router.fleet.worker_streams import StepStream, WatchStream
from router.fleet.worker_view import WorkerView
from router.session_registry import SessionRegistry

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")

HELLO_S = 5.0
PROBE_S = 0.5
CANCEL_S = 1.0
SCHEDULE_S = 2.5  # longer than any step; a worker that hangs costs its new sequences this much
RECONNECT_S = 0.2
REFUSED_S = 5.0  # until a worker that does not fit is asked again
SILENT_S = 2.0  # a worker that reports nothing for so long gets nothing new


class LinkBroken(Exception):
    """A call to a worker failed on the way; it may or may not have been done."""


class WorkerLink:
    """One worker process life. All methods are for the event loop."""

    def __init__(
        self,
        member: Member,
        router_id: str,
        sessions: SessionRegistry,
        models: ModelRegistry,
        index: KvIndex,
        on_report: Callable[[], None] = lambda: None,
    ) -> None:
        described = json.loads(member.info)
        self.incarnation = member.id
        self.worker_id: str = described["worker_id"]
        self.endpoint: str = described["endpoint"]
        self.pid: int = described.get("pid", 0)
        self.hello: worker_pb2.HelloResponse | None = None
        self.facts: WorkerFacts | None = None
        self.load = worker_pb2.Load()
        self.load_at = 0.0
        self.reason = "not met yet"  # why it is not available; empty when it is
        self.lost = False
        self.has_lease = True
        self.pending_dispatches = PendingDispatches()
        self._declined = False  # it had no room, and has not reported since
        self._replaced = False  # another process listens at its endpoint
        self._router_id = router_id
        self._models = models
        self._index = index
        self._on_report = on_report
        self._channel = rpc.channel(self.endpoint, internal=True)
        self._stub = worker_pb2_grpc.WorkerStub(self._channel)
        self.steps = StepStream(self._stub, self.incarnation, router_id, sessions)
        self._watch = WatchStream(self._stub, self.incarnation, index, self._reported)
        self._replays = ReplayPace()

    # What the router asks of a worker

    async def schedule(self, admission: Admission, follow: bool) -> tuple[Outcome, Failure | None]:
        """Raises LinkBroken when no answer came. With `follow`, an admitted sequence comes on the Step stream."""
        request = worker_pb2.ScheduleRequest(
            router_id=self._router_id if follow else "", admissions=[admission_to_wire(admission)]
        )
        try:
            response = await self._answer(self._stub.Schedule, request, SCHEDULE_S)
        except grpc.aio.AioRpcError as error:
            self._declined = True
            raise LinkBroken(f"worker {self.worker_id}: Schedule: {error.code().name}") from error
        result = response.results[0]
        outcome = Outcome(result.outcome)
        if outcome is Outcome.ADMITTED:
            self.pending_dispatches.admitted(admission.seq_id)
        self._declined |= outcome is Outcome.LATER
        return outcome, wire.failure_from_wire(result.failure) if result.HasField("failure") else None

    async def pace(self, num_tokens: int) -> None:
        """Waits until a replay of so many tokens may be sent."""
        load, idle = self.load, self.load.num_running + self.load.num_waiting + self.load.num_swapped == 0
        delay_s = self._replays.delay_s(
            time.monotonic(),
            num_tokens,
            idle=idle,
            tokens_per_s=load.prefill_tokens_per_s,
            burst_tokens=self.facts.max_batch_tokens if self.facts else 0,
        )
        if delay_s:
            await asyncio.sleep(delay_s)

    async def cancel(self, seq_id: SequenceId, epoch: int) -> None:
        """Best effort: the record's cancel flag is what counts."""
        request = worker_pb2.WorkerCancelRequest(sequences=[worker_pb2.SequenceEpoch(seq_id=seq_id, epoch=epoch)])
        try:
            await self._answer(self._stub.Cancel, request, CANCEL_S)
        except (grpc.aio.AioRpcError, LinkBroken) as error:
            log.debug("worker %s: Cancel: %s", self.worker_id, error)

    async def probe(self) -> bool | None:
        """True: it lives. False: nobody listens, or somebody else. None: no answer in time, so nobody knows."""
        try:
            hello = await self._answer(self._stub.Hello, self._hello_request(), PROBE_S)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return None
            return error.code() != grpc.StatusCode.UNAVAILABLE  # any other status was sent by somebody alive
        except LinkBroken:
            return False
        return bool(hello.incarnation == self.incarnation)

    async def _answer(self, call: Callable[..., Awaitable[Reply]], request: object, timeout_s: float) -> Reply:
        """Raises LinkBroken when this link is closed, before or meanwhile: its worker is lost."""
        try:
            return await call(request, timeout=timeout_s)
        except grpc.aio.UsageError as error:
            raise LinkBroken(f"worker {self.worker_id} is lost") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise LinkBroken(f"worker {self.worker_id} is lost") from error  # it is the call that was cancelled

    def view(self) -> WorkerView:
        """A snapshot for placement."""
        load, facts, reason = self.load, self.facts, self._unavailable()
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
            prefill_tokens_per_s=load.prefill_tokens_per_s,
            recent_picks=self.pending_dispatches.num_recent,
        )

    def _unavailable(self) -> str:
        """Why nothing is to be placed there; empty if it may be. Its process may live while its engine hangs."""
        if self.lost or self.reason or self.facts is None:
            return self.reason or ("lost" if self.lost else "not met yet")
        if not self.steps.connected:
            return "its streams are not open"
        if not self.has_lease:
            return "its lease has ended: its engine makes no progress"
        if (silent_s := time.monotonic() - self.load_at) > SILENT_S:
            return f"silent for {silent_s:.0f} s"
        return "had no room; until its next report" if self._declined else ""

    # Its life

    async def run(self, on_broken: Callable[["WorkerLink"], Awaitable[None]]) -> None:
        """Meets the worker and keeps both streams open until it is lost. `on_broken` finds out whether it is."""
        while not self.lost:
            try:
                met = await self._meet()
                if met:
                    await self._streams()
                    self.reason = "its streams broke"
                if self.facts or self._replaced:
                    await on_broken(self)
                await asyncio.sleep(RECONNECT_S if met or not self.hello else REFUSED_S)
            except Exception:
                log.exception("worker %s: its link failed", self.worker_id)
                await asyncio.sleep(REFUSED_S)

    def give_up(self) -> None:
        """The worker is lost."""
        self.lost = True
        self._index.drop(self.incarnation)

    async def close(self) -> None:
        self.give_up()
        self._models.leave(self.incarnation)
        await self._channel.close()

    def _hello_request(self) -> worker_pb2.HelloRequest:
        return worker_pb2.HelloRequest(router_id=self._router_id, schema_revision=wire.SCHEMA_REVISION)

    async def _meet(self) -> bool:
        """Whether it is the one it should be, and fits; else `reason` says why not."""
        try:
            hello = await self._stub.Hello(self._hello_request(), timeout=HELLO_S)
        except grpc.aio.AioRpcError as error:
            self.reason = f"does not answer: {error.code().name}"
            return False
        self._replaced = hello.incarnation != self.incarnation
        if self._replaced:
            self.reason = "another process listens at its endpoint"
            return False
        self.hello = hello
        if hello.schema_revision != wire.SCHEMA_REVISION:
            self.reason = f"speaks schema {hello.schema_revision}, this router {wire.SCHEMA_REVISION}"
            return False
        facts = facts_of(hello)
        if mismatch := await self._models.meet(facts):
            if mismatch != self.reason:
                log.error("worker %s is not used: %s", self.worker_id, mismatch)
            self.reason = mismatch
            return False
        self.facts = facts
        return True

    async def _streams(self) -> None:
        """Returns when either stream has broken."""
        tasks = [asyncio.create_task(stream.run()) for stream in (self._watch, self.steps)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            for outcome in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(outcome, Exception) and not isinstance(outcome, grpc.aio.AioRpcError):
                    log.error("worker %s: stream failed", self.worker_id, exc_info=outcome)

    def _reported(self, load: worker_pb2.Load) -> None:
        self.load, self.load_at = load, time.monotonic()
        self.pending_dispatches.reported()
        self.reason = "draining" if load.draining else ""
        self._declined = False
        self._on_report()


def facts_of(hello: worker_pb2.HelloResponse) -> WorkerFacts:
    return WorkerFacts(
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
