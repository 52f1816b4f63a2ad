"""The two calls to a worker that report progress until something is over, Drain and Migrate, and how a migration ended.

Both raise the ServingError of the call, or Unreachable where the worker sent none. What was begun outlives its call.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import grpc

from octavo.internal.v1 import worker_pb2
from octavo.request.errors import Failure, Unreachable
from octavo.request.ids import Incarnation
from octavo.wire import statuses
from octavo.wire.public import failure_from_wire


class MigrationEnd(Enum):
    """Where a migration has left its sequence."""

    MOVED = auto()  # the target runs it
    STAYED = auto()  # it runs where it ran; the failure says why
    ENDED = auto()  # it has ended, or another worker has taken it: read the record


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationReport:
    """The end of one migration, with what it has cost."""

    outcome: MigrationEnd
    failure: Failure | None = None
    epoch: int = 0
    target: Incarnation = Incarnation("")
    num_blocks: int = 0  # full blocks of the sequence
    num_sent_blocks: int = 0  # of these, those that the target did not have
    num_sent_bytes: int = 0
    total_ms: float = 0.0
    stopped_ms: float = 0.0  # of these, those without a step

    @property
    def moved(self) -> bool:
        return self.outcome is MigrationEnd.MOVED


OUTCOMES = {
    worker_pb2.MIGRATION_OUTCOME_MOVED: MigrationEnd.MOVED,
    worker_pb2.MIGRATION_OUTCOME_STAYED: MigrationEnd.STAYED,
    worker_pb2.MIGRATION_OUTCOME_ENDED: MigrationEnd.ENDED,
}


def gone(worker_id: str) -> Unreachable:
    """The error for a worker that this router has no link to any more."""
    return Unreachable(f"worker {worker_id} has ended, or was lost: list the workers again")


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


async def read_report(method: Callable[..., Any], request: object, worker_id: str) -> MigrationReport:
    """How the migration ends that the worker is asked for."""
    async with aclosing(read_progress(method, request, worker_id)) as messages:
        async for message in messages:
            if message.outcome in OUTCOMES:
                return report_of(message)
    raise Unreachable(f"worker {worker_id} did not say how the migration ended: list the sequences")


async def read_progress(method: Callable[..., Any], request: object, worker_id: str) -> AsyncGenerator[Any, None]:
    """What the worker says of such a call, until it is over."""
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
