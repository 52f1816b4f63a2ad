"""What a caller gets when the worker of a link does not answer, answers as another process, or is removed meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from gpu_worker.serving.calls.worker_service import WorkerService
from octavo.internal.v1 import worker_pb2, worker_pb2_grpc
from octavo.net.server import make_server
from octavo.request import errors
from octavo.request.ids import Incarnation
from octavo.request.record import AdmissionAnswer, AdmissionOutcome
from octavo.store.calls import Member
from octavo.wire.internal import INTERNAL_REVISION, answer_to_wire
from router.fleet import worker_link
from router.fleet.kv_index import KvIndex
from router.fleet.model_registry import ModelRegistry
from router.fleet.worker_link import LinkError, ProbeResult, WorkerLink
from router.session_registry import SessionRegistry

ADMISSION = worker_pb2.Admission(seq_id="a" * 32, epoch=1)


class Silent(worker_pb2_grpc.WorkerServicer):
    """A worker that takes calls and answers none."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def Schedule(self, request, context):
        self.called.set()
        await asyncio.sleep(60)

    Cancel = Hello = Schedule


class Answering(worker_pb2_grpc.WorkerServicer):
    """A worker that answers Hello with an incarnation and a revision, and every admission with one outcome."""

    def __init__(self, incarnation: str = "i", outcome: int = 0, revision: int = INTERNAL_REVISION) -> None:
        self.incarnation, self.outcome, self.revision = incarnation, outcome, revision

    async def Hello(self, request, context):
        return worker_pb2.HelloResponse(incarnation=self.incarnation, internal_revision=self.revision)

    async def Schedule(self, request, context):
        results = [worker_pb2.AdmissionResult(seq_id=each.seq_id, outcome=self.outcome) for each in request.admissions]
        return worker_pb2.ScheduleResponse(results=results)


@asynccontextmanager
async def linked(servicer: worker_pb2_grpc.WorkerServicer) -> AsyncIterator[WorkerLink]:
    """The link of a router to a worker with incarnation "i"."""
    server = make_server(internal=True)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    link = link_to(f"127.0.0.1:{port}")
    yield link
    await link.close()
    await server.stop(0)


def link_to(endpoint: str) -> WorkerLink:
    member = Member("worker", Incarnation("i"), json.dumps({"worker_id": "w", "endpoint": endpoint}).encode())
    return WorkerLink(member, "r", SessionRegistry(), ModelRegistry(), KvIndex())


@pytest.fixture
async def silent() -> AsyncIterator[tuple[Silent, WorkerLink]]:
    servicer = Silent()
    async with linked(servicer) as link:
        yield servicer, link


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """What waits for an answer that comes, or for the end of the link, waits on a busy machine as well."""
    for name in ("SCHEDULE_S", "CANCEL_S", "PROBE_S"):
        monkeypatch.setattr(worker_link, name, 30.0)


async def test_waiting_for_a_removed_worker_ends(silent):
    """The caller gets a LinkError, and is not cancelled together with the call."""
    servicer, link = silent
    scheduling = asyncio.create_task(link.schedule(ADMISSION, follow=False))
    await servicer.called.wait()
    cancelling, probing = (
        asyncio.create_task(link.cancel_sequence(ADMISSION.seq_id, 1)),
        asyncio.create_task(link.probe()),
    )
    await asyncio.sleep(0.1)
    await link.close()
    with pytest.raises(LinkError):
        await scheduling
    await cancelling
    assert await probing is ProbeResult.GONE


@pytest.mark.parametrize(("incarnation", "found"), [("i", ProbeResult.ALIVE), ("j", ProbeResult.GONE)])
async def test_a_probe_knows_another_worker_by_its_incarnation(incarnation, found):
    async with linked(Answering(incarnation)) as link:
        assert await link.probe() is found


@pytest.mark.parametrize(
    ("error", "closed"),
    [(errors.OutOfBlocks("full"), True), (errors.NoAdapterRoom("full"), False), (errors.Loading("being read"), False)],
)
async def test_an_adapter_without_room_closes_no_worker_to_others(error, closed):
    later, answering = AdmissionAnswer(AdmissionOutcome.LATER, error.failure()), Answering()

    async def schedule(request, context):
        return worker_pb2.ScheduleResponse(results=[answer_to_wire(request.admissions[0].seq_id, later)])

    answering.Schedule = schedule
    async with linked(answering) as link:
        assert await link.schedule(ADMISSION, follow=False) == later
        assert link._declined is closed


OLDER, NEWER = INTERNAL_REVISION - 1, INTERNAL_REVISION + 1


@pytest.mark.parametrize(
    ("revision", "reason"),
    [
        (OLDER, f"speaks internal revision {OLDER}, this router {INTERNAL_REVISION}: upgrade the worker"),
        (INTERNAL_REVISION, ""),
        (NEWER, f"speaks internal revision {NEWER}, this router {INTERNAL_REVISION}: upgrade the router"),
    ],
)
async def test_a_router_uses_workers_of_its_own_revision(revision, reason):
    async with linked(Answering(revision=revision)) as link:
        opening = asyncio.create_task(link.keep_open(on_broken=lambda _: asyncio.sleep(0)))
        async with asyncio.timeout(20):
            while not link.hello or link.unusable_reason == "not met yet":  # noqa: ASYNC110  a task of the link sets it
                await asyncio.sleep(0.01)
            if reason:
                assert (link.unusable_reason, link.facts) == (reason, None)
            else:
                while not link.facts:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                assert "revision" not in link.unusable_reason
        opening.cancel()


async def test_a_probe_without_an_answer_decides_nothing(silent, monkeypatch):
    monkeypatch.setattr(worker_link, "PROBE_S", 0.1)
    _, link = silent
    assert await link.probe() is ProbeResult.UNKNOWN


@pytest.mark.parametrize(
    ("servicer", "error"),
    [
        (WorkerService("w", Incarnation("i")), errors.Loading),  # its own error passes
        (worker_pb2_grpc.WorkerServicer(), errors.Unreachable),  # an older worker: UNIMPLEMENTED, without details
    ],
)
async def test_a_drain_that_fails_is_a_typed_error(servicer, error):
    async with linked(servicer) as link:
        with pytest.raises(error):
            async for _ in link.drain(0, undo=False):
                pass


async def test_draining_a_removed_worker_is_a_typed_error():
    class Slow(worker_pb2_grpc.WorkerServicer):
        async def Drain(self, request, context):
            yield worker_pb2.DrainResponse(num_left=1)
            await asyncio.sleep(60)

    async with linked(Slow()) as link:
        drain = link.drain(0, undo=False)
        assert (await anext(drain)).num_left == 1
        await link.close()
        with pytest.raises(errors.Unreachable, match="has ended"):
            await anext(drain)
        with pytest.raises(errors.Unreachable, match="has ended"):
            await anext(link.drain(0, undo=False))
