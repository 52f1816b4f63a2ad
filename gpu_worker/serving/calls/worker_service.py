"""The Worker service: each call is checked here, and handed to the part that it asks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpu_worker.engine.engine import Engine
from gpu_worker.engine.worker_watch import WorkerWatch
from gpu_worker.journal.sequence_tracer import SequenceTracer
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.migration.source.migration_registry import MigrationRegistry
from gpu_worker.migration.transfer_service import TransferService
from gpu_worker.scheduling.state.scheduler_config import StepBudget
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.serving.admission.admissions import Admissions
from gpu_worker.serving.calls.kept_prefixes import KeptPrefixes
from gpu_worker.serving.calls.messages import SWAP_OPERATIONS, hello_to_wire, migration_to_wire, watch_to_wire
from gpu_worker.serving.calls.step_handler import StepHandler
from gpu_worker.serving.calls.vector_calls import VectorCalls
from gpu_worker.serving.leaving.drain import WorkerDrain
from octavo.internal.v1 import transfer_pb2_grpc, worker_pb2, worker_pb2_grpc
from octavo.model_files.lora_support import LoraSupport
from octavo.net.traces import NO_PARENT, traceparent_in
from octavo.pictures.support import NO_PICTURES, PictureSupport
from octavo.request import limits, validation
from octavo.request.errors import CannotMove, Draining, InvalidArgument, Loading, ServingError
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import AdmissionAnswer, AdmissionOutcome, WorkerRole
from octavo.wire.internal import admission_from_wire, answer_to_wire
from octavo.wire.public import failure_to_wire

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[object, object]

SERVICES = ("octavo.internal.v1.Worker", "octavo.internal.v1.Transfer")
DEFAULT_WATCH_MS = 500
MIN_WATCH_MS = 10
LOADING_RETRY_MS = 1000
DEFAULT_DRAIN_MS = 60_000
DRAIN_PROGRESS_S = 0.25  # how often a caller of Drain is told how many sequences are left
LATE_S = 5.0  # so long before its time is over a drain releases what still waits for its turn to move
LATE_SHARE = 0.25  # the same as a share of a short time
MIGRATION_PROGRESS_S = 0.1  # how often a caller of Migrate is told how far it has come


@dataclass(frozen=True, slots=True)
class ServedWorker:
    """The parts of a worker that calls of routers ask."""

    engine: Engine
    workload: Workload
    budget: StepBudget
    admissions: Admissions
    publisher: StepPublisher
    watch: WorkerWatch
    vectors: VectorCalls
    kept: KeptPrefixes
    drain: WorkerDrain | None = None  # None: calls of Drain are answered Loading
    migrations: MigrationRegistry | None = None  # None: no sequence moves with its blocks
    tracer: SequenceTracer | None = None
    lora_support: LoraSupport = field(default_factory=LoraSupport)  # which adapters run here
    picture_support: PictureSupport = NO_PICTURES  # which pictures prompts here may show


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """What routers call. Calls that need the engine are answered Loading until `serve` has been called."""

    def __init__(self, worker_id: str, incarnation: Incarnation, role: WorkerRole = WorkerRole.BOTH) -> None:
        self.worker_id = worker_id
        self._role = role
        self._incarnation = incarnation
        self._served: ServedWorker | None = None

    def serve(self, served: ServedWorker) -> None:
        """Lets this worker answer calls from now on: its model is loaded, and the store has answered."""
        self._served = served

    @property
    def _worker(self) -> ServedWorker:
        """Raises Loading while there is no engine."""
        if self._served is None:
            raise self._loading()
        return self._served

    def _loading(self) -> Loading:
        starting = f"worker {self.worker_id} has not started yet: it loads its model or waits for the store"
        return Loading(starting, retry_after_ms=LOADING_RETRY_MS)

    async def Hello(self, request: worker_pb2.HelloRequest, context: "Context") -> worker_pb2.HelloResponse:
        worker = self._worker
        return hello_to_wire(
            *(self.worker_id, self._incarnation, worker.workload, worker.budget.tokens, self._role),
            *(worker.lora_support, worker.picture_support, worker.watch.ranks()),
        )

    async def Schedule(self, request: worker_pb2.ScheduleRequest, context: "Context") -> worker_pb2.ScheduleResponse:
        check_batch_size("admissions", len(request.admissions))
        worker, router_id = self._worker, request.router_id
        if worker.watch.draining:
            raise Draining(f"worker {self.worker_id} drains: place elsewhere")
        traceparent = traceparent_in(context.invocation_metadata()) if worker.tracer is not None else NO_PARENT
        results = await asyncio.gather(
            *(admission_result(worker, item, router_id, traceparent) for item in request.admissions)
        )
        return worker_pb2.ScheduleResponse(results=results)

    async def Step(
        self, requests: AsyncIterator[worker_pb2.StepRequest], context: "Context"
    ) -> AsyncIterator[worker_pb2.StepResult]:
        worker = self._worker
        handler = StepHandler(worker.publisher, worker.engine.control, self._incarnation)
        async with aclosing(handler.messages(requests)) as messages:
            async for message in messages:
                yield message

    async def Swap(self, request: worker_pb2.SwapRequest, context: "Context") -> worker_pb2.SwapResponse:
        check_batch_size("items", len(request.items))
        worker = self._worker
        results = await asyncio.gather(*(swap_result(worker, item) for item in request.items))
        return worker_pb2.SwapResponse(results=results)

    async def Migrate(
        self, request: worker_pb2.WorkerMigrateRequest, context: "Context"
    ) -> AsyncIterator[worker_pb2.WorkerMigrateResponse]:
        seq_id = validation.validate_sequence_id("seq_id", request.seq_id)
        migrations = self._worker.migrations
        if migrations is None:
            text = "no sequence leaves this worker with its blocks: without journal or prefix cache, or by move_limit"
            raise CannotMove(text, cause="runner")
        target = await migrations.find_target(Incarnation(request.target)) if request.target else None
        progress = migrations.begin(seq_id, request.epoch, target, during_prefill=request.during_prefill)
        while not progress.done.is_set():
            yield migration_to_wire(progress)
            with suppress(TimeoutError):
                async with asyncio.timeout(MIGRATION_PROGRESS_S):
                    await progress.done.wait()
        yield migration_to_wire(progress)

    async def Cancel(
        self, request: worker_pb2.WorkerCancelRequest, context: "Context"
    ) -> worker_pb2.WorkerCancelResponse:
        self._worker.admissions.cancel((SequenceId(item.seq_id), item.epoch) for item in request.sequences)
        return worker_pb2.WorkerCancelResponse()

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: "Context"
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        worker = self._worker
        interval_s = max(MIN_WATCH_MS, request.interval_ms or DEFAULT_WATCH_MS) / 1000
        watcher = worker.watch.watchers.open_watcher()
        try:
            batch = await worker.watch.begin_watch(watcher)
            while True:
                yield watch_to_wire(self._incarnation, worker.watch, worker.publisher, batch)
                batch = await watcher.next_batch(interval_s)
        finally:
            worker.watch.watchers.close_watcher(watcher)

    async def Pool(self, request: worker_pb2.PoolRequest, context: "Context") -> AsyncIterator[worker_pb2.PoolResponse]:
        check_batch_size("prompts", len(request.prompts))
        worker = self._worker
        if worker.watch.draining:
            raise Draining(f"worker {self.worker_id} drains: ask another one")
        async with aclosing(worker.vectors.answer(request)) as responses:
            async for response in responses:
                yield response

    async def Keep(self, request: worker_pb2.KeepRequest, context: "Context") -> worker_pb2.KeepResponse:
        answer = await self._worker.kept.keep(request.router_id, request.hashes)
        return worker_pb2.KeepResponse(missing=answer.missing, num_kept=answer.num_kept)

    async def Drain(
        self, request: worker_pb2.DrainRequest, context: "Context"
    ) -> AsyncIterator[worker_pb2.DrainResponse]:
        drain = self._worker.drain
        if drain is None:
            raise self._loading()
        if not request.grace_ms <= limits.MAX_DRAIN_MS:
            raise InvalidArgument("grace_ms", f"{request.grace_ms} is more than {limits.MAX_DRAIN_MS}")
        released_before, migrated_before = drain.num_released, drain.num_migrated
        if request.undo:
            drain.undo()
        else:
            grace_s = (request.grace_ms or DEFAULT_DRAIN_MS) / 1000
            drain.begin(grace_s, late_s=min(LATE_S, LATE_SHARE * grace_s))
        while True:
            done = request.undo or drain.done
            yield worker_pb2.DrainResponse(
                num_left=drain.num_left,
                num_released=drain.num_released - released_before,
                num_migrated=drain.num_migrated - migrated_before,
            )
            if done:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_PROGRESS_S):
                    await drain.wait_until_done()


def add_services(server: "grpc.aio.Server", service: WorkerService, transfer: TransferService) -> None:
    """Lets the server answer Worker and Transfer. Call it before the server starts."""
    worker_pb2_grpc.add_WorkerServicer_to_server(service, server)
    transfer_pb2_grpc.add_TransferServicer_to_server(transfer, server)


def check_batch_size(field: str, size: int) -> None:
    """Raises InvalidArgument if the call has too many items."""
    if not size <= limits.MAX_BATCH_ITEMS:
        raise InvalidArgument(field, f"{size} items; send at most {limits.MAX_BATCH_ITEMS}")


async def admission_result(
    worker: ServedWorker, message: worker_pb2.Admission, router_id: str, traceparent: str
) -> worker_pb2.AdmissionResult:
    """The answer to one admission of a call; an admission that cannot be read is REJECTED.

    A span of the sequence begins before the sequence can end.
    """
    seq_id, epoch, tracer = SequenceId(message.seq_id), message.epoch, worker.tracer
    begun = tracer is not None and tracer.begin(seq_id, epoch, traceparent)
    try:
        answer = await worker.admissions.admit(admission_from_wire(message), router_id)
    except InvalidArgument as error:
        answer = AdmissionAnswer(AdmissionOutcome.REJECTED, error.failure())
    if begun and tracer is not None and not answer.admitted:
        tracer.drop(seq_id, epoch)
    return answer_to_wire(message.seq_id, answer)


async def swap_result(worker: ServedWorker, item: worker_pb2.SwapItem) -> worker_pb2.SwapResult:
    """What one item of a call moved, or why it moved nothing. A worker that drains holds no sequence back by OUT."""
    result = worker_pb2.SwapResult(seq_id=item.seq_id)
    try:
        if item.operation not in SWAP_OPERATIONS:
            raise InvalidArgument("operation", "must be OUT, IN or DROP")
        operation = SWAP_OPERATIONS[item.operation]
        if worker.watch.draining and operation == "out":
            raise Draining("this worker drains: its sequences end here or go elsewhere, and none is held")
        answer = await asyncio.wrap_future(worker.engine.swap(SequenceId(item.seq_id), item.epoch, operation))
        result.num_blocks, result.num_bytes = answer.num_blocks, answer.num_bytes
        result.copy_ms = answer.copy_s * 1000
    except ServingError as error:
        result.failure.CopyFrom(failure_to_wire(error.failure()))
    return result
