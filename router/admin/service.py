"""The Admin service: what this router knows of workers, sequences and placements, for operators."""

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn, cast

from octavo import limits, validation, wire
from octavo.errors import InvalidArgument, NotFound, Unimplemented
from octavo.ids import Incarnation, sequence_id
from octavo.record import Record
from octavo.store.base import Store
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_pool import WorkerPool
from router.placing.assigner import Assigner
from router.placing.placement import PlacementCandidate, PlacementDecision
from router.streaming.request_preparer import TENANT, RequestPreparer

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    Context = grpc.aio.ServicerContext[object, object]

MAX_SEQUENCES = 10_000
DEFAULT_SEQUENCES = 1000
COMES_LATER = "comes with live migration; stop a worker with SIGTERM, and others take its sequences over by replay"


class AdminService(admin_pb2_grpc.AdminServicer):
    """The service that operators call."""

    def __init__(
        self, store: Store, router_id: Incarnation, pool: WorkerPool, assigner: Assigner, preparer: RequestPreparer
    ) -> None:
        self._store = store
        self._router_id = router_id
        self._pool = pool
        self._assigner = assigner
        self._preparer = preparer

    def serve_on(self, server: "grpc.aio.Server") -> None:
        admin_pb2_grpc.add_AdminServicer_to_server(self, server)

    async def ListWorkers(
        self, request: admin_pb2.ListWorkersRequest, context: "Context"
    ) -> admin_pb2.ListWorkersResponse:
        links = sorted(self._pool.links.values(), key=lambda link: link.worker_id)
        depth = await self._store.queue_depth()
        return admin_pb2.ListWorkersResponse(
            workers=[worker_to_wire(link) for link in links], router_id=self._router_id, num_queued=depth.num_queued
        )

    async def ListSequences(
        self, request: admin_pb2.ListSequencesRequest, context: "Context"
    ) -> admin_pb2.ListSequencesResponse:
        if request.limit > MAX_SEQUENCES:
            raise InvalidArgument("limit", f"{request.limit} is too many; at most {MAX_SEQUENCES}")
        records = await self._store.list_sequences(
            Incarnation(request.owner) if request.owner else None, request.limit or DEFAULT_SEQUENCES
        )
        records.sort(key=lambda record: record.accepted_ms)
        # Any read brings the time of the store's clock, by which all times in records are.
        snapshot = await self._store.read(records[-1].seq_id) if records else None
        now_ms = snapshot.now_ms if snapshot else 0
        return admin_pb2.ListSequencesResponse(sequences=[sequence_to_wire(record, now_ms) for record in records])

    async def ExplainPlacement(
        self, request: admin_pb2.ExplainPlacementRequest, context: "Context"
    ) -> admin_pb2.ExplainPlacementResponse:
        match request.WhichOneof("what"):
            case "request_id":
                request_id = validation.validate_request_id(request.request_id)
                decision = self._assigner.decisions.get(sequence_id(TENANT, request_id))
                if decision is None:
                    raise NotFound(
                        "request_id: this router did not place it, or has forgotten it; ask another router",
                        resource="request",
                        name=request_id,
                    )
            case "hypothetical":
                try:
                    prepared = await self._preparer.prepare(request.hypothetical)
                except InvalidArgument as error:
                    raise error.inside("hypothetical") from None
                new = prepared.new
                decision = self._assigner.decide_placement(prepared.model, list(new.prompt), new.salt, set())
            case _:
                raise InvalidArgument("what", "send a request_id or a hypothetical request")
        return decision_to_wire(decision)

    async def Migrate(self, request: admin_pb2.MigrateRequest, context: "Context") -> NoReturn:
        raise Unimplemented(f"Migrate {COMES_LATER}")

    async def DrainWorker(
        self, request: admin_pb2.DrainWorkerRequest, context: "Context"
    ) -> AsyncIterator[admin_pb2.DrainWorkerResponse]:
        if not request.worker_id:
            raise InvalidArgument("worker_id", "name the worker, as ListWorkers does")
        if request.grace_ms > limits.MAX_DRAIN_MS:
            raise InvalidArgument("grace_ms", f"{request.grace_ms} is more than {limits.MAX_DRAIN_MS}, an hour")
        async with aclosing(self._link_of(request.worker_id).drain(request.grace_ms, undo=request.undo)) as drain:
            async for progress in drain:
                yield admin_pb2.DrainWorkerResponse(num_left=progress.num_left, num_released=progress.num_released)

    def _link_of(self, worker_id: str) -> WorkerLink:
        """This router's link to the living worker of that name. Raises NotFound."""
        named = [link for link in self._pool.links.values() if link.worker_id == worker_id and not link.lost]
        if not named:
            known = ", ".join(sorted({link.worker_id for link in self._pool.links.values() if not link.lost}))
            raise NotFound(
                f"worker_id: this router knows no worker {worker_id!r}; it knows: {known or 'none'}",
                resource="worker",
                name=worker_id,
            )
        return max(named, key=lambda link: (link.step_stream.connected, link.load_at))

    async def WatchCluster(self, request: admin_pb2.WatchClusterRequest, context: "Context") -> NoReturn:
        raise Unimplemented("WatchCluster comes with `octavo top`; poll ListWorkers until then")


def worker_to_wire(link: WorkerLink) -> admin_pb2.WorkerStatus:
    view = link.view()
    hello = link.hello
    return admin_pb2.WorkerStatus(
        **(_shared_fields(hello, admin_pb2.WorkerStatus) if hello else {"worker_id": link.worker_id}),
        endpoint=link.endpoint,
        load=admin_pb2.WorkerLoad(**_shared_fields(link.load, admin_pb2.WorkerLoad)),
        load_age_ms=int((time.monotonic() - link.load_at) * 1000) if link.load_at else 0,
        available=view.available,
        reason=view.reason_unavailable,
        pid=link.pid,
    )


def _shared_fields(message: "Message", into: "type[Message]") -> dict[str, Any]:
    """The values of the fields that the internal message has in common with the public one, by name."""
    names = set(message.DESCRIPTOR.fields_by_name) & set(into.DESCRIPTOR.fields_by_name)
    return {name: getattr(message, name) for name in names}


def sequence_to_wire(record: Record, now_ms: int) -> admin_pb2.SequenceStatus:
    return admin_pb2.SequenceStatus(
        seq_id=record.seq_id,
        request_id=record.request_id,
        state=wire.state_to_wire(record.state),
        epoch=record.epoch,
        owner=record.owner,
        prompt_tokens=record.prompt_len,
        num_tokens=record.num_tokens,
        age_ms=max(0, now_ms - record.accepted_ms),
        priority=cast("inference_pb2.Priority", record.priority),
        crashes=record.crashes,
    )


def decision_to_wire(decision: PlacementDecision) -> admin_pb2.ExplainPlacementResponse:
    return admin_pb2.ExplainPlacementResponse(
        worker_id=decision.worker.worker_id if decision.worker else "",
        candidates=[candidate_to_wire(candidate) for candidate in decision.candidates],
    )


def candidate_to_wire(candidate: PlacementCandidate) -> admin_pb2.Candidate:
    return admin_pb2.Candidate(
        worker_id=candidate.worker_id,
        eligible=candidate.eligible,
        reason=candidate.reason,
        device_hit_tokens=candidate.device_hit_tokens,
        host_hit_tokens=candidate.host_hit_tokens,
        prefill_cost=candidate.prefill_cost,
        load_cost=candidate.load_cost,
        pressure_cost=candidate.pressure_cost,
        total_cost=candidate.total_cost,
        recent_picks=candidate.recent_picks,
    )
