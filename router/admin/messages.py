"""Makes the messages of the Admin service from what a router knows of workers, sequences and placements."""

import time
from typing import TYPE_CHECKING, Any, cast

from octavo.metrics.value import Histogram
from octavo.request.record import Record, SequenceState, WorkerRole
from octavo.store.calls import QueueDepths
from octavo.v1 import admin_pb2, inference_pb2
from octavo.wire.internal import role_from_wire
from octavo.wire.requests import state_to_wire
from router.admin.move_log import MoveReason, SeenMove
from router.fleet.worker_link import WorkerLink
from router.placing.placement import PlacementDecision
from router.streaming.progress.progress_registry import ModelProgress

if TYPE_CHECKING:
    from google.protobuf.message import Message

ROLES = {
    WorkerRole.BOTH: admin_pb2.WORKER_ROLE_BOTH,
    WorkerRole.PREFILL: admin_pb2.WORKER_ROLE_PREFILL,
    WorkerRole.DECODE: admin_pb2.WORKER_ROLE_DECODE,
}
MOVE_KINDS = {
    MoveReason.MIGRATED: admin_pb2.MOVE_KIND_MIGRATED,
    MoveReason.TAKEN_OVER: admin_pb2.MOVE_KIND_TAKEN_OVER,
    MoveReason.REPLACED: admin_pb2.MOVE_KIND_REPLACED,
}


def worker_to_wire(link: WorkerLink) -> admin_pb2.WorkerStatus:
    view = link.view()
    hello = link.hello
    said: dict[str, Any] = {"worker_id": link.worker_id}
    if hello:  # the numbers of the public roles are others: there, 0 is a worker that has said nothing
        said = {**shared_fields(hello, admin_pb2.WorkerStatus), "role": ROLES[role_from_wire(hello.role)]}
    return admin_pb2.WorkerStatus(
        **said,
        endpoint=link.endpoint,
        load=link.load,
        load_age_ms=int((time.monotonic() - link.load_at) * 1000) if link.load_at else 0,
        available=view.available,
        reason=view.reason_unavailable,
        pid=link.pid,
    )


def shared_fields(known: object, into: "type[Message]") -> dict[str, Any]:
    """The values of the fields that a message has in common with what is known, by name."""
    return {name: getattr(known, name) for name in into.DESCRIPTOR.fields_by_name if hasattr(known, name)}


def sequence_to_wire(record: Record, now_ms: int) -> admin_pb2.SequenceStatus:
    return admin_pb2.SequenceStatus(
        seq_id=record.seq_id,
        request_id=record.request_id,
        state=state_to_wire(record.state),
        epoch=record.epoch,
        owner=record.owner,
        prompt_tokens=record.prompt_len,
        num_tokens=record.num_tokens,
        age_ms=max(0, now_ms - record.accepted_ms),
        priority=cast("inference_pb2.Priority", record.priority),
        crashes=record.crashes,
        tenant=record.tenant,
        moving_to=record.mig_to if record.state is SequenceState.RUNNING else "",
    )


def decision_to_wire(decision: PlacementDecision) -> admin_pb2.ExplainPlacementResponse:
    return admin_pb2.ExplainPlacementResponse(
        worker_id=decision.worker.worker_id if decision.worker else "",
        candidates=[admin_pb2.Candidate(**shared_fields(each, admin_pb2.Candidate)) for each in decision.candidates],
    )


def queue_to_wire(depths: QueueDepths) -> admin_pb2.QueueStatus:
    return admin_pb2.QueueStatus(
        num_queued=depths.total.num_queued,
        queued_tokens=depths.total.queued_tokens,
        tenants=[
            admin_pb2.TenantQueue(
                tenant=each.tenant, num_queued=each.depth.num_queued, queued_tokens=each.depth.queued_tokens
            )
            for each in depths.tenants
        ],
        num_tenants=depths.num_tenants,
    )


def move_to_wire(move: SeenMove, now: float) -> admin_pb2.SequenceMove:
    return admin_pb2.SequenceMove(
        seq_id=move.seq_id,
        request_id=move.request_id,
        kind=MOVE_KINDS[move.reason],
        from_worker=move.source,
        to_worker=move.target,
        age_ms=max(0, round(1000 * (now - move.at))),
        tenant=move.tenant,
        number=move.number,
        seen=move.seen,
    )


def traffic_to_wire(progress: ModelProgress) -> admin_pb2.ModelTraffic:
    tally = progress.tally
    return admin_pb2.ModelTraffic(
        model=progress.model,
        num_accepted=tally.num_accepted,
        num_ended=tally.ends.total(),
        num_output_tokens=tally.num_output_tokens + progress.num_under_way,
        num_prompt_tokens=tally.num_prompt_tokens,
        num_cached_tokens=tally.num_cached_tokens,
        queued=histogram_to_wire(tally.queued),
        first_token=histogram_to_wire(tally.first_token),
        between_tokens=histogram_to_wire(tally.between_tokens),
    )


def histogram_to_wire(histogram: Histogram) -> admin_pb2.TimeHistogram:
    return admin_pb2.TimeHistogram(bounds_s=histogram.bounds, counts=histogram.counts, total_s=histogram.total)
