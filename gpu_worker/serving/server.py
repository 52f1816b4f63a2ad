"""The Worker service: what routers ask goes to the engine client, what the engine brings goes up their streams."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, NoReturn

from gpu_worker.serving.cache_watchers import CacheEventBatch
from gpu_worker.serving.engine_client import EngineClient
from gpu_worker.serving.messages import (
    SWAPS,
    hello_to_wire,
    step_to_wire,
    watch_to_wire,
)
from gpu_worker.serving.step_subscription import StepSubscription
from octavo import limits, wire
from octavo.errors import Draining, InvalidArgument, Loading, ServingError, TooManyStreams, Unimplemented
from octavo.ids import Incarnation, SequenceId
from octavo.record import AdmissionAnswer, AdmissionOutcome
from octavo.v1 import transfer_pb2_grpc, worker_pb2, worker_pb2_grpc

if TYPE_CHECKING:
    import grpc

    Context = grpc.aio.ServicerContext[object, object]

SERVICES = ("octavo.v1.Worker", "octavo.v1.Transfer")
MAX_STREAMS = 256
DEFAULT_WATCH_MS = 500
MIN_WATCH_MS = 10
LOADING_RETRY_MS = 1000
NO_TRANSFER = "Transfer comes with live migration; until then a sequence moves by take and replay"


class WorkerService(worker_pb2_grpc.WorkerServicer):
    """What routers call. Until `ready` every call is answered Loading. Holds no state but who it is."""

    def __init__(self, worker_id: str, incarnation: Incarnation) -> None:
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._ready: EngineClient | None = None
        self.draining = False

    def ready(self, engine_client: EngineClient) -> None:
        """The model is loaded, and the loop goes round."""
        self._ready = engine_client

    @property
    def _engine_client(self) -> EngineClient:
        if self._ready is None:
            raise Loading(f"worker {self._worker_id} is still loading its model", retry_after_ms=LOADING_RETRY_MS)
        return self._ready

    async def Hello(self, request: worker_pb2.HelloRequest, context: "Context") -> worker_pb2.HelloResponse:
        return hello_to_wire(self._worker_id, self._incarnation, self._engine_client)

    async def Schedule(self, request: worker_pb2.ScheduleRequest, context: "Context") -> worker_pb2.ScheduleResponse:
        check_batch("admissions", len(request.admissions))
        if self.draining:
            raise Draining(f"worker {self._worker_id} is draining: place elsewhere")
        client, router_id = self._engine_client, request.router_id
        answers = await asyncio.gather(*(admitted(client, item, router_id) for item in request.admissions))
        return worker_pb2.ScheduleResponse(
            results=[
                wire.answer_to_wire(item.seq_id, answer)
                for item, answer in zip(request.admissions, answers, strict=True)
            ]
        )

    async def Step(
        self, requests: AsyncIterator[worker_pb2.StepRequest], context: "Context"
    ) -> AsyncIterator[worker_pb2.StepResult]:
        publisher = self._engine_client.publisher
        if len(publisher.subscriptions) >= MAX_STREAMS:
            raise TooManyStreams(f"{MAX_STREAMS} Step streams are open: close one, or retry", retry_after_ms=1000)
        subscription = StepSubscription()
        publisher.attach(subscription)
        reader = asyncio.create_task(self._read_commands(subscription, requests))
        try:
            while True:
                while subscription.ready:
                    yield step_to_wire(subscription.ready.popleft(), self._incarnation)
                if subscription.overflowed:
                    raise TooManyStreams("this stream reads too slowly: read the journal and follow again")
                if reader.done():
                    reader.result()  # a bad command ends the stream with its error
                if (subscription.closing or reader.done()) and not subscription.num_awaited:
                    return
                await subscription.wake.wait()
                subscription.wake.clear()
        finally:
            publisher.detach(subscription)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read_commands(
        self, subscription: StepSubscription, requests: AsyncIterator[worker_pb2.StepRequest]
    ) -> None:
        try:
            async for request in requests:
                self._command(subscription, request)
        finally:
            subscription.wake.set()

    def _command(self, subscription: StepSubscription, request: worker_pb2.StepRequest) -> None:
        engine_client = self._engine_client
        if not request.HasField("open"):  # which a router sends first, so that it is told of nothing else
            engine_client.publisher.add_observer(subscription)
        match request.WhichOneof("command"):
            case "open":
                engine_client.publisher.assign_router(
                    subscription, check_router_id(subscription, request.open.router_id)
                )
            case "grant":
                engine_client.grant(subscription, request.grant.steps)
            case "pause":
                engine_client.pause()
            case "follow":
                follow = request.follow
                engine_client.publisher.follow(subscription, SequenceId(follow.seq_id), list(follow.next_indexes))
            case "unfollow":
                engine_client.publisher.unfollow(subscription, SequenceId(request.unfollow.seq_id))
            case _:
                raise InvalidArgument("command", "send one of open, grant, pause, follow, unfollow")

    async def Swap(self, request: worker_pb2.SwapRequest, context: "Context") -> worker_pb2.SwapResponse:
        check_batch("items", len(request.items))
        engine_client = self._engine_client
        return worker_pb2.SwapResponse(
            results=await asyncio.gather(*(swapped(engine_client, item) for item in request.items))
        )

    async def Cancel(
        self, request: worker_pb2.WorkerCancelRequest, context: "Context"
    ) -> worker_pb2.WorkerCancelResponse:
        self._engine_client.cancel([(SequenceId(item.seq_id), item.epoch) for item in request.sequences])
        return worker_pb2.WorkerCancelResponse()

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: "Context"
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        engine_client = self._engine_client
        watcher = engine_client.watchers.open_watcher()
        interval_s = max(MIN_WATCH_MS, request.interval_ms or DEFAULT_WATCH_MS) / 1000
        try:
            snapshot = await engine_client.cache_snapshot(watcher)
            yield self._watched(snapshot.batch, snapshot.hashes)
            while True:
                yield self._watched(await watcher.next_batch(interval_s))
        finally:
            engine_client.watchers.close_watcher(watcher)

    def _watched(self, batch: CacheEventBatch, cached_hashes: bytes | None = None) -> worker_pb2.WatchResponse:
        report = self._engine_client.report
        return watch_to_wire(self._incarnation, report, batch, draining=self.draining, cached_hashes=cached_hashes)

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


def check_router_id(subscription: StepSubscription, router_id: str) -> str:
    if not (1 <= len(router_id) <= limits.MAX_ROUTER_ID_CHARS and router_id.isascii() and router_id.isprintable()):
        raise InvalidArgument("open.router_id", f"must be 1 to {limits.MAX_ROUTER_ID_CHARS} printable ASCII characters")
    if subscription.router_id not in ("", router_id):
        raise InvalidArgument("open.router_id", "this stream has another one; open a second stream")
    return router_id


async def admitted(engine_client: EngineClient, message: worker_pb2.Admission, router_id: str) -> AdmissionAnswer:
    """The answer to one admission of a batch; one that cannot even be read is REJECTED."""
    try:
        admission = wire.admission_from_wire(message)
    except InvalidArgument as error:
        return AdmissionAnswer(AdmissionOutcome.REJECTED, error.failure())
    return await engine_client.admit(admission, router_id)


async def swapped(engine_client: EngineClient, item: worker_pb2.SwapItem) -> worker_pb2.SwapResult:
    result = worker_pb2.SwapResult(seq_id=item.seq_id)
    try:
        if item.operation not in SWAPS:
            raise InvalidArgument("operation", "must be OUT, IN or DROP")
        result.num_blocks = await engine_client.swap(SequenceId(item.seq_id), item.epoch, SWAPS[item.operation])
    except ServingError as error:
        result.failure.CopyFrom(wire.failure_to_wire(error.failure()))
    return result
