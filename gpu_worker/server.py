"""The Worker service: turns wire messages into commands to the engine, and results into wire messages."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NoReturn

from gpu_worker.desk import AdmissionRequest, Desk, Outcome, SwapOperation
from gpu_worker.plan import TokenScore
from gpu_worker.streams import Item, Step, Stream
from gpu_worker.watchers import Batch
from octavo import limits, wire
from octavo.errors import Draining, Failure, InvalidArgument, Loading, ServingError, TooManyStreams, Unimplemented
from octavo.ids import Incarnation, SequenceId
from octavo.v1 import transfer_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[object, object]

log = logging.getLogger(__name__)

SERVICES = ("octavo.v1.Worker", "octavo.v1.Transfer")
MAX_STREAMS = 256
DEFAULT_WATCH_MS = 500
MIN_WATCH_MS = 10
LOADING_RETRY_MS = 1000
NO_TRANSFER = "Transfer comes with live migration; until then a sequence moves by take and replay"

OUTCOMES = {
    Outcome.ADMITTED: worker_pb2.ADMISSION_OUTCOME_ADMITTED,
    Outcome.LATER: worker_pb2.ADMISSION_OUTCOME_LATER,
    Outcome.NEVER: worker_pb2.ADMISSION_OUTCOME_NEVER,
    Outcome.REJECTED: worker_pb2.ADMISSION_OUTCOME_REJECTED,
    Outcome.STALE_EPOCH: worker_pb2.ADMISSION_OUTCOME_STALE_EPOCH,
}
SWAPS: dict[int, SwapOperation] = {
    worker_pb2.SWAP_OPERATION_OUT: "out",
    worker_pb2.SWAP_OPERATION_IN: "in",
    worker_pb2.SWAP_OPERATION_DROP: "drop",
}


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """What routers call. Until `ready` every call is answered Loading. Holds no state but who it is."""

    def __init__(self, worker_id: str, incarnation: Incarnation) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._ready: Desk | None = None
        self.draining = False

    def ready(self, desk: Desk) -> None:
        """The model is loaded, and the loop goes round."""
        self._ready = desk

    @property
    def _desk(self) -> Desk:
        if self._ready is None:
            raise Loading(f"worker {self._worker_id} is still loading its model", retry_after_ms=LOADING_RETRY_MS)
        return self._ready

    async def Hello(self, request: worker_pb2.HelloRequest, context: "Context") -> worker_pb2.HelloResponse:
        info, scheduler = self._desk.info, self._desk.engine.scheduler
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
            max_batch_tokens=scheduler.budget.tokens,
            max_batch_sequences=scheduler.config.max_batch_sequences,
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
                next(admitted) if isinstance(admission, AdmissionRequest) else (Outcome.REJECTED, admission.failure())
            )
            results.append(
                worker_pb2.AdmissionResult(seq_id=original.seq_id, outcome=OUTCOMES[outcome], failure=to_wire(failure))
            )
        return worker_pb2.ScheduleResponse(results=results)

    async def Step(
        self, requests: AsyncIterator[worker_pb2.StepRequest], context: "Context"
    ) -> AsyncIterator[worker_pb2.StepResult]:
        streams = self._desk.streams
        if len(streams.open_streams) >= MAX_STREAMS:
            raise TooManyStreams(f"{MAX_STREAMS} Step streams are open: close one, or retry", retry_after_ms=1000)
        stream = Stream()
        streams.attach(stream)
        reader = asyncio.create_task(self._read_commands(stream, requests))
        try:
            while True:
                while stream.ready:
                    yield step_to_wire(stream.ready.popleft(), self._incarnation)
                if stream.overflowed:
                    raise TooManyStreams("this stream reads too slowly: read the journal and follow again")
                if reader.done():
                    reader.result()  # a bad command ends the stream with its error
                if (stream.closing or reader.done()) and not stream.num_awaited:
                    return
                await stream.wake.wait()
                stream.wake.clear()
        finally:
            streams.detach(stream)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read_commands(self, stream: Stream, requests: AsyncIterator[worker_pb2.StepRequest]) -> None:
        try:
            async for request in requests:
                self._command(stream, request)
        finally:
            stream.wake.set()

    def _command(self, stream: Stream, request: worker_pb2.StepRequest) -> None:
        desk = self._desk
        if not request.HasField("open"):  # which a router sends first, so that it is told of nothing else
            desk.streams.observe(stream)
        match request.WhichOneof("command"):
            case "open":
                desk.streams.name(stream, check_router_id(stream, request.open.router_id))
            case "grant":
                desk.grant(stream, request.grant.steps)
            case "pause":
                desk.pause()
            case "follow":
                follow = request.follow
                desk.streams.follow(stream, SequenceId(follow.seq_id), list(follow.next_indexes))
            case "unfollow":
                desk.streams.unfollow(stream, SequenceId(request.unfollow.seq_id))
            case _:
                raise InvalidArgument("command", "send one of open, grant, pause, follow, unfollow")

    async def Swap(self, request: worker_pb2.SwapRequest, context: "Context") -> worker_pb2.SwapResponse:
        check_batch("items", len(request.items))
        desk = self._desk
        return worker_pb2.SwapResponse(results=await asyncio.gather(*(swapped(desk, item) for item in request.items)))

    async def Cancel(
        self, request: worker_pb2.WorkerCancelRequest, context: "Context"
    ) -> worker_pb2.WorkerCancelResponse:
        self._desk.cancel([(SequenceId(item.seq_id), item.epoch) for item in request.sequences])
        return worker_pb2.WorkerCancelResponse()

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: "Context"
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        desk = self._desk
        watcher = desk.watchers.open()
        interval_s = max(MIN_WATCH_MS, request.interval_ms or DEFAULT_WATCH_MS) / 1000
        try:
            device, host, batch = await desk.cache_snapshot(watcher)
            yield self._watch_response(batch, worker_pb2.KvSnapshot(device_hashes=device, host_hashes=host))
            while True:
                yield self._watch_response(await watcher.next(interval_s))
        finally:
            desk.watchers.close(watcher)

    def _watch_response(self, batch: Batch, snapshot: worker_pb2.KvSnapshot | None = None) -> worker_pb2.WatchResponse:
        report = self._desk.report
        load = report.load
        return worker_pb2.WatchResponse(
            incarnation=self._incarnation,
            event_seq=batch.event_seq,
            digest=batch.digest,
            snapshot=snapshot,
            events=[event_to_wire(kind, hashes) for kind, hashes in batch.events],
            load=worker_pb2.Load(
                num_running=load.num_running,
                num_waiting=load.num_waiting,
                num_swapped=load.num_swapped,
                num_free_blocks=load.num_free_blocks,
                num_cached_blocks=load.num_cached_blocks,
                num_used_blocks=load.num_used_blocks,
                num_prefill_tokens=load.num_prefill_tokens,
                step_ms=report.step_s * 1000,
                num_steps=report.num_steps,
                draining=self.draining,
                num_sequences=load.num_sequences,
                prefill_tokens_per_s=report.prefill_tokens_per_s,
                num_free_host_blocks=load.num_free_host_blocks,
                num_preempted_swap=load.num_preempted_swap,
                num_preempted_recompute=load.num_preempted_recompute,
            ),
        )

    async def Drain(self, request: worker_pb2.DrainRequest, context: "Context") -> NoReturn:
        raise Unimplemented(
            "Drain comes with live migration; stop a worker with SIGTERM, and others replay what it ran"
        )


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


def add_services(server: "grpc.aio.Server", service: WorkerService) -> None:
    """Before the server starts."""
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    transfer_pb2_grpc.add_TransferServicer_to_server(TransferService(), server)


def check_batch(field: str, size: int) -> None:
    if not size <= limits.MAX_BATCH_ITEMS:
        raise InvalidArgument(field, f"{size} items; send at most {limits.MAX_BATCH_ITEMS}")


def check_router_id(stream: Stream, router_id: str) -> str:
    if not (1 <= len(router_id) <= limits.MAX_ROUTER_ID_CHARS and router_id.isascii() and router_id.isprintable()):
        raise InvalidArgument("open.router_id", f"must be 1 to {limits.MAX_ROUTER_ID_CHARS} printable ASCII characters")
    if stream.router_id not in ("", router_id):
        raise InvalidArgument("open.router_id", "this stream has another one; open a second stream")
    return router_id


async def swapped(desk: Desk, item: worker_pb2.SwapItem) -> worker_pb2.SwapResult:
    result = worker_pb2.SwapResult(seq_id=item.seq_id)
    try:
        if item.operation not in SWAPS:
            raise InvalidArgument("operation", "must be OUT, IN or DROP")
        result.num_blocks = await desk.swap(SequenceId(item.seq_id), item.epoch, SWAPS[item.operation])
    except ServingError as error:
        result.failure.CopyFrom(wire.failure_to_wire(error.failure()))
    return result


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


def step_to_wire(step: Step, incarnation: Incarnation) -> worker_pb2.StepResult:
    return worker_pb2.StepResult(
        step_id=step.step_id,
        incarnation=incarnation,
        items=[item_to_wire(item) for item in step.items],
        unknown_seq_ids=step.unknown,
        num_branches=step.num_branches,
        num_tokens=step.num_tokens,
    )


def item_to_wire(item: Item) -> worker_pb2.StepItem:
    message = worker_pb2.StepItem(
        seq_id=item.seq_id,
        epoch=item.epoch,
        branch=item.branch,
        first_index=item.first_index,
        token_ids=item.token_ids,
        chain=item.chain,
    )
    if item.finish:
        message.finish_reason = wire.finish_to_wire(item.finish)
    if item.cumulative_logprob is not None:
        message.cumulative_logprob = item.cumulative_logprob
    if item.cached_tokens is not None:
        message.cached_tokens = item.cached_tokens
    if item.scores:
        message.logprobs.extend(score_to_wire(score) for score in item.scores)
    if item.prompt_scores:
        message.prompt_logprobs.extend(score_to_wire(score) for score in item.prompt_scores)
    if item.failure:
        message.failure.CopyFrom(wire.failure_to_wire(Failure.from_json(item.failure)))
    return message


def event_to_wire(kind: str, hashes: bytes) -> worker_pb2.KvEvent:
    if kind == "cleared":
        return worker_pb2.KvEvent(cleared=True)
    return worker_pb2.KvEvent(stored=hashes) if kind == "stored" else worker_pb2.KvEvent(removed=hashes)


def score_to_wire(score: TokenScore) -> types_pb2.Logprobs:
    return wire.score_to_wire(score.token_id, score.logprob, score.top)
