"""What a Step stream is told while it is open, and while it is not."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest
from waiting import until

from octavo.internal.v1 import worker_pb2
from octavo.request.ids import Incarnation, SequenceId
from router.fleet.worker_streams import StepStream
from router.session_registry import SessionRegistry

SEQ = SequenceId("a" * 32)


class FakeCall:
    """A stream that notes what it is told, until the test breaks it."""

    def __init__(self) -> None:
        self.commands: list[str] = []
        self.broken = asyncio.Event()

    async def write(self, request: worker_pb2.StepRequest) -> None:
        self.commands.append(request.WhichOneof("command"))

    async def read(self) -> object:
        await self.broken.wait()
        return grpc.aio.EOF

    def cancel(self) -> None:
        self.broken.set()


@pytest.fixture
def calls() -> list[FakeCall]:
    return []


@pytest.fixture
def stream(calls: list[FakeCall]) -> StepStream:
    def step() -> FakeCall:
        calls.append(FakeCall())
        return calls[-1]

    return StepStream(SimpleNamespace(Step=step), Incarnation("i"), "router", SessionRegistry())


async def test_a_stream_that_is_closed_keeps_nothing_of_what_it_is_told(stream, calls):
    """Clients leave also while their worker cannot be reached: what they want no more is not wanted from any stream."""
    for number in range(2):
        stream.follow(SEQ, [0])
        stream.unfollow(SEQ)
        assert stream._commands.empty()
        reading = asyncio.create_task(stream.read_items())
        await until(lambda: stream.connected)
        stream.follow(SEQ, [0])
        stream.unfollow(SEQ)
        await until(lambda number=number: len(calls) == number + 1 and len(calls[number].commands) == 4)
        assert calls[number].commands == ["open", "grant", "follow", "unfollow"]
        calls[number].broken.set()
        stream.unfollow(SEQ)  # the stream has broken, and nobody has noticed
        await reading
        assert stream._commands.empty()
