"""The two calls to a worker that report progress until something is over: Drain and Migrate.

Both raise the ServingError of the call, or Unreachable where the worker sent none. What was begun outlives its call.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import grpc

from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.request.errors import Unreachable
from octavo.request.ids import Incarnation, SequenceId
from octavo.wire import statuses
from octavo.wire.public import failure_from_wire
from router.fleet.migration_report import MigrationEnd, MigrationReport

OUTCOMES = {
    worker_pb2.MIGRATION_OUTCOME_MOVED: MigrationEnd.MOVED,
    worker_pb2.MIGRATION_OUTCOME_STAYED: MigrationEnd.STAYED,
    worker_pb2.MIGRATION_OUTCOME_ENDED: MigrationEnd.ENDED,
}


def gone(worker_id: str) -> Unreachable:
    """The error for a worker that this router has no link to any more."""
    return Unreachable(f"worker {worker_id} has ended, or was lost: list the workers again")


async def drain_worker(
    stub: worker_pb2_grpc.WorkerStub, worker_id: str, grace_ms: int, *, undo: bool
) -> AsyncGenerator[worker_pb2.DrainResponse, None]:
    """Has the worker drain, or end its drain, and passes on its progress."""
    request = worker_pb2.DrainRequest(grace_ms=grace_ms, undo=undo)
    async with aclosing(_read_progress(stub.Drain, request, worker_id)) as messages:
        async for progress in messages:
            yield progress


async def migrate_sequence(
    stub: worker_pb2_grpc.WorkerStub,
    worker_id: str,
    seq_id: SequenceId,
    epoch: int,
    target: Incarnation,
    *,
    during_prefill: bool,
) -> MigrationReport:
    """Asks the worker to migrate a sequence to the target, and waits for the end of the migration.

    If the sequence is migrating already, the call waits for that migration, whichever its target is.
    """
    request = worker_pb2.WorkerMigrateRequest(seq_id=seq_id, epoch=epoch, target=target, during_prefill=during_prefill)
    async with aclosing(_read_progress(stub.Migrate, request, worker_id)) as messages:
        async for message in messages:
            if message.outcome in OUTCOMES:
                return report_of(message)
    raise Unreachable(f"worker {worker_id} did not say how the migration ended: list the sequences")


def report_of(message: worker_pb2.WorkerMigrateResponse) -> MigrationReport:
    """The report that a message with an outcome makes."""
    return MigrationReport(
        outcome=OUTCOMES[message.outcome],
        failure=failure_from_wire(message.failure) if message.HasField("failure") else None,
        epoch=message.epoch,
        target=Incarnation(message.target),
        num_blocks=message.num_blocks,
        num_sent_blocks=message.num_sent_blocks,
        num_sent_bytes=message.num_sent_bytes,
        total_ms=message.total_ms,
        stopped_ms=message.stopped_ms,
    )


async def _read_progress(method: Callable[..., Any], request: object, worker_id: str) -> AsyncGenerator[Any, None]:
    try:
        call = method(request)
    except grpc.aio.UsageError as error:
        raise gone(worker_id) from error
    try:
        async for progress in call:
            yield progress
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise gone(worker_id) from error  # the call was cancelled, and not this task: this link is closed
    except grpc.aio.AioRpcError as error:
        if statuses.status_in(error) is not None:
            raise statuses.error_from(error) from error
        raise Unreachable(f"worker {worker_id} does not answer ({error.code().name}): retry") from error
    finally:
        call.cancel()
