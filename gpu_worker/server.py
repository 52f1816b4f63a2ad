"""The Worker service: turns wire messages into commands to the engine, and results into wire messages."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING, NoReturn

from gpu_worker.desk import AdmissionRequest, Desk, Outcome
from gpu_worker.plan import TokenScore
from gpu_worker.streams import Item, Step, Stream
from octavo import wire
from octavo.errors import Draining, Failure, InvalidArgument, ServingError, TooManyStreams, Unimplemented
from octavo.ids import Incarnation, SequenceId
from octavo.v1 import transfer_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[object, object]

log = logging.getLogger(__name__)

MAX_BATCH = 1024
MAX_STREAMS = 256
DEFAULT_WATCH_MS = 500
NO_TRANSFER = "Transfer comes with live migration; until then a sequence moves by take and replay"

OUTCOMES = {
    Outcome.ADMITTED: worker_pb2.ADMISSION_OUTCOME_ADMITTED,
    Outcome.LATER: worker_pb2.ADMISSION_OUTCOME_LATER,
    Outcome.NEVER: worker_pb2.ADMISSION_OUTCOME_NEVER,
    Outcome.REJECTED: worker_pb2.ADMISSION_OUTCOME_REJECTED,
    Outcome.STALE_EPOCH: worker_pb2.ADMISSION_OUTCOME_STALE_EPOCH,
}
SWAPS = {
    worker_pb2.SWAP_OPERATION_OUT: "out",
    worker_pb2.SWAP_OPERATION_IN: "in",
    worker_pb2.SWAP_OPERATION_DROP: "drop",
}


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """What routers call. Holds no state of its own but the open streams."""

    def __init__(self, worker_id: str, incarnation: Incarnation, desk: Desk) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._desk = desk
        self._streams = desk.streams
        self._engine = desk.engine
        self.draining = False

    async def Hello(self, request: worker_pb2.HelloRequest, context: "Context") -> worker_pb2.HelloResponse:
        info, config = self._desk.info, self._engine.scheduler.config
        return worker_pb2.HelloResponse(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            schema_revision=wire.SCHEMA_REVISION,
            model=info.model,
            model_fingerprint=info.fingerprint,
            block_size=info.block_size,
            kv_dtype=info.kv_dtype,
            kv_layout=info.layout,
            num_blocks=info.num_blocks,
            num_host_blocks=info.num_host_blocks,
            context_tokens=info.context_tokens,
            vocab_size=info.vocab_size,
            tokenizer=info.tokenizer,
            eos_token_ids=info.eos_token_ids,
            max_batch_tokens=config.max_batch_tokens,
            max_batch_sequences=config.max_batch_sequences,
            device=info.device,
        )

    async def Schedule(self, request: worker_pb2.ScheduleRequest, context: "Context") -> worker_pb2.ScheduleResponse:
        check_batch("admissions", len(request.admissions))
        if self.draining:
            raise Draining(f"worker {self._worker_id} is draining: place elsewhere")
        parsed = [parse_admission(admission) for admission in request.admissions]
        good = [admission for admission in parsed if isinstance(admission, AdmissionRequest)]
        admitted = iter(await self._desk.admit(good, request.router_id))
        results = []
        for admission, original in zip(parsed, request.admissions, strict=True):
            outcome, failure = (
                next(admitted)
                if isinstance(admission, AdmissionRequest)
                else (Outcome.REJECTED, admission.failure())
            )
            results.append(
                worker_pb2.AdmissionResult(
                    seq_id=original.seq_id, outcome=OUTCOMES[outcome], failure=to_wire(failure)
                )
            )
        return worker_pb2.ScheduleResponse(results=results)

    async def Step(
        self, requests: AsyncIterator[worker_pb2.StepRequest], context: "Context"
    ) -> AsyncIterator[worker_pb2.StepResult]:
        if len(self._streams.open_streams) >= MAX_STREAMS:
            raise TooManyStreams(f"{MAX_STREAMS} Step streams are open: close one, or retry", retry_after_ms=1000)
        stream = Stream()
        self._streams.attach(stream)
        reader = asyncio.create_task(self._read_commands(stream, requests))
        try:
            while True:
                while stream.ready:
                    yield self._step_result(stream.ready.popleft())
                if stream.overflowed:
                    raise TooManyStreams("this stream reads too slowly: read the journal and follow again")
                if reader.done() and not stream.closing:
                    reader.result()  # a bad command ends the stream with its error
                    stream.closing = True
                if stream.closing and not stream.num_awaited:
                    return
                await stream.wake.wait()
                stream.wake.clear()
        finally:
            reader.cancel()
            self._streams.detach(stream)

    async def _read_commands(self, stream: Stream, requests: AsyncIterator[worker_pb2.StepRequest]) -> None:
        try:
            async for request in requests:
                self._command(stream, request)
        finally:
            stream.wake.set()

    def _command(self, stream: Stream, request: worker_pb2.StepRequest) -> None:
        match request.WhichOneof("command"):
            case "open":
                self._streams.name(stream, request.open.router_id)
            case "grant":
                stream.num_awaited += request.grant.steps
                self._engine.grant(request.grant.steps)
            case "pause":
                self._engine.pause()
            case "follow":
                follow = request.follow
                self._streams.follow(stream, SequenceId(follow.seq_id), list(follow.next_indexes))
            case "unfollow":
                self._streams.unfollow(stream, SequenceId(request.unfollow.seq_id))
            case _:
                raise InvalidArgument("command", "send one of open, grant, pause, follow, unfollow")

    def _step_result(self, step: Step) -> worker_pb2.StepResult:
        return worker_pb2.StepResult(
            step_id=step.step_id,
            incarnation=self._incarnation,
            items=[item_to_wire(item) for item in step.items],
            unknown_seq_ids=step.unknown,
            num_branches=step.num_branches,
            num_tokens=step.num_tokens,
        )

    async def Swap(self, request: worker_pb2.SwapRequest, context: "Context") -> worker_pb2.SwapResponse:
        check_batch("items", len(request.items))
        results = []
        for item in request.items:
            result = worker_pb2.SwapResult(seq_id=item.seq_id)
            try:
                if item.operation not in SWAPS:
                    raise InvalidArgument("operation", "must be OUT, IN or DROP")
                result.num_blocks = await self._desk.swap(SequenceId(item.seq_id), item.epoch, SWAPS[item.operation])
            except ServingError as error:
                result.failure.CopyFrom(wire.failure_to_wire(error.failure()))
            results.append(result)
        return worker_pb2.SwapResponse(results=results)

    async def Cancel(
        self, request: worker_pb2.WorkerCancelRequest, context: "Context"
    ) -> worker_pb2.WorkerCancelResponse:
        for item in request.sequences:
            self._desk.cancel(SequenceId(item.seq_id), item.epoch)
        return worker_pb2.WorkerCancelResponse()

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: "Context"
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        watcher = self._desk.watchers.open()
        interval_s = (request.interval_ms or DEFAULT_WATCH_MS) / 1000
        try:
            device, host = await self._desk.cache_snapshot(watcher)
            snapshot = worker_pb2.KvSnapshot(device_hashes=device, host_hashes=host)
            yield self._watch_response(watcher.event_seq, watcher.digest, snapshot)
            while True:
                batch = await watcher.next(interval_s)
                yield self._watch_response(batch.event_seq, batch.digest, None, batch.events)
        finally:
            self._desk.watchers.close(watcher)

    def _watch_response(
        self,
        event_seq: int,
        digest: int,
        snapshot: worker_pb2.KvSnapshot | None,
        events: Iterable[tuple[str, bytes]] = (),
    ) -> worker_pb2.WatchResponse:
        load, times = self._desk.load, self._engine.times
        return worker_pb2.WatchResponse(
            incarnation=self._incarnation,
            event_seq=event_seq,
            digest=digest,
            snapshot=snapshot,
            events=[worker_pb2.KvEvent(**{kind: hashes if kind != "cleared" else True}) for kind, hashes in events],
            load=worker_pb2.Load(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_swapped=load.num_swapped,
                num_free_blocks=load.num_free_blocks,
                num_cached_blocks=load.num_cached_blocks,
                num_used_blocks=load.num_used_blocks,
                num_prefill_tokens=load.num_prefill_tokens,
                step_ms=times.step_s * 1000,
                num_steps=times.num_steps,
                draining=self.draining,
                num_sequences=load.num_sequences,
                prefill_tokens_per_s=times.prefill_tokens_per_s,
                num_free_host_blocks=load.num_free_host_blocks,
                num_preempted_swap=load.num_preempted_swap,
                num_preempted_recompute=load.num_preempted_recompute,
            ),
        )

    async def Drain(self, request: worker_pb2.DrainRequest, context: "Context") -> NoReturn:
        raise Unimplemented("Drain comes with live migration; stop a worker with SIGTERM, and others replay what it ran")


class TransferService(transfer_pb2_grpc.TransferServicer):
    """Live migration comes later: every call answers UNIMPLEMENTED with what to do instead."""

    async def Prepare(self, request: object, context: "Context") -> NoReturn:
        raise Unimplemented(NO_TRANSFER)

    async def Push(self, requests: object, context: "Context") -> NoReturn:
        raise Unimplemented(NO_TRANSFER)

    async def Finish(self, request: object, context: "Context") -> NoReturn:
        raise Unimplemented(NO_TRANSFER)

    async def Abort(self, request: object, context: "Context") -> NoReturn:
        raise Unimplemented(NO_TRANSFER)


def check_batch(field: str, size: int) -> None:
    if size > MAX_BATCH:
        raise InvalidArgument(field, f"{size} items; send at most {MAX_BATCH}")


def parse_admission(admission: worker_pb2.Admission) -> AdmissionRequest | ServingError:
    try:
        return AdmissionRequest(
            seq_id=SequenceId(admission.seq_id),
            epoch=admission.epoch,
            prompt=list(admission.prompt.ids),
            outputs=[list(output.ids) for output in admission.outputs],
            finished_branches=tuple(admission.finished_branches),
            params=wire.sampling_from_wire(admission.sampling),
            salt=admission.salt,
            priority=admission.priority,
            deadline_in_ms=admission.deadline_in_ms,
            alone=admission.alone,
        )
    except ServingError as error:
        return error


def to_wire(failure: Failure | None) -> types_pb2.Failure | None:
    return wire.failure_to_wire(failure) if failure else None


def item_to_wire(item: Item) -> worker_pb2.StepItem:
    message = worker_pb2.StepItem(
        seq_id=item.seq_id,
        epoch=item.epoch,
        branch=item.branch,
        first_index=item.first_index,
        token_ids=item.token_ids,
        chain=item.chain,
        finish_reason=wire.finish_to_wire(item.finish),
        cumulative_logprob=item.cumulative_logprob,
        cached_tokens=item.cached_tokens,
    )
    if item.scores:
        message.logprobs.extend(score_to_wire(score) for score in item.scores)
    if item.prompt_scores:
        message.prompt_logprobs.extend(score_to_wire(score) for score in item.prompt_scores)
    if item.failure:
        message.failure.CopyFrom(wire.failure_to_wire(Failure.from_json(item.failure)))
    return message


def score_to_wire(score: TokenScore) -> types_pb2.Logprobs:
    return wire.score_to_wire(score.token_id, score.logprob, score.top)
