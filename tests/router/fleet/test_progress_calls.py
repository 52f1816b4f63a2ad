"""What a worker reports of a migration, as plain values, and what its caller is told where it does not."""

import asyncio

import grpc
import pytest

from octavo.internal.v1 import worker_pb2
from octavo.request.errors import OutOfBlocks, Unreachable
from octavo.request.ids import Incarnation, SequenceId
from octavo.wire.public import failure_to_wire
from router.fleet.migration_report import MigrationEnd, MigrationReport
from router.fleet.progress_calls import migrate_sequence

SEQ, TARGET = SequenceId("a" * 32), Incarnation("target")
ENDINGS = {"moved": MigrationEnd.MOVED, "stayed": MigrationEnd.STAYED, "ended": MigrationEnd.ENDED}


class FakeCall:
    def __init__(self, *messages):
        self.messages, self.cancelled = messages, False

    async def __aiter__(self):
        for message in self.messages:
            if isinstance(message, BaseException):
                raise message
            yield message

    def cancel(self):
        self.cancelled = True


class FakeStub:
    def __init__(self, *messages):
        self.call, self.requests = FakeCall(*messages), []

    def Migrate(self, request):
        self.requests.append(request)
        return self.call


@pytest.mark.parametrize("name", ENDINGS)
async def test_the_last_message_makes_the_report(name):
    failure = OutOfBlocks("full").failure()
    last = worker_pb2.WorkerMigrateResponse(
        outcome=worker_pb2.MigrationOutcome.Value(f"MIGRATION_OUTCOME_{name.upper()}"),
        failure=failure_to_wire(failure) if name == "stayed" else None,
        epoch=7,
        target=TARGET,
        num_blocks=9,
        num_sent_blocks=8,
        num_sent_bytes=4096,
        total_ms=2.5,
        stopped_ms=0.5,
    )
    stub = FakeStub(worker_pb2.WorkerMigrateResponse(rounds=1), worker_pb2.WorkerMigrateResponse(rounds=2), last)
    assert await migrate_sequence(stub, "worker-0", SEQ, 6, TARGET, during_prefill=False) == MigrationReport(
        outcome=ENDINGS[name],
        failure=failure if name == "stayed" else None,
        epoch=7,
        target=TARGET,
        num_blocks=9,
        num_sent_blocks=8,
        num_sent_bytes=4096,
        total_ms=2.5,
        stopped_ms=0.5,
    )
    assert stub.requests == [worker_pb2.WorkerMigrateRequest(seq_id=SEQ, epoch=6, target=TARGET)]
    assert stub.call.cancelled  # nothing is left open


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([worker_pb2.WorkerMigrateResponse(rounds=1)], "did not say how the migration ended"),
        ([], "did not say how the migration ended"),
        ([asyncio.CancelledError()], "has ended, or was lost"),
        ([grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, (), (), "reset")], "does not answer"),
    ],
    ids=["progress", "nothing", "closed", "broken"],
)
async def test_a_call_without_an_end_is_unreachable(messages, says):
    with pytest.raises(Unreachable, match=says):
        await migrate_sequence(FakeStub(*messages), "worker-0", SEQ, 6, TARGET, during_prefill=False)
