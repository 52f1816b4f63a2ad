"""What a caller gets when the worker of a link does not answer, answers as another process, or is removed meanwhile."""

import asyncio
import json
from contextlib import asynccontextmanager

import grpc
import pytest
from waiting import until

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

    def __init__(self):
        self.called = asyncio.Event()

    async def Schedule(self, request, context):
        self.called.set()
        await asyncio.sleep(60)

    Cancel = Hello = Schedule


class Answering(worker_pb2_grpc.WorkerServicer):
    """A worker that answers Hello with an incarnation and a revision, and every admission with one outcome."""

    def __init__(self, incarnation="i", answer=None, revision=INTERNAL_REVISION):
        self.incarnation, self.answer, self.revision = incarnation, answer, revision

    async def Hello(self, request, context):
        return worker_pb2.HelloResponse(incarnation=self.incarnation, internal_revision=self.revision)

    async def Schedule(self, request, context):
        return worker_pb2.ScheduleResponse(results=[answer_to_wire(request.admissions[0].seq_id, self.answer)])


@asynccontextmanager
async def linked(servicer):
    """The link of a router to a worker with incarnation "i"."""
    server = make_server(internal=True)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    info = json.dumps({"worker_id": "w", "endpoint": f"127.0.0.1:{port}"}).encode()
    member = Member("worker", Incarnation("i"), info)
    link = WorkerLink(member, "r", SessionRegistry(), ModelRegistry(), KvIndex())
    yield link
    await link.close()
    await server.stop(0)


@pytest.fixture
async def silent():
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
    calls = link.schedule(ADMISSION, follow=False), link.cancel_sequence(ADMISSION.seq_id, 1), link.probe()
    scheduling, cancelling, probing = map(asyncio.create_task, calls)
    await servicer.called.wait()
    await asyncio.sleep(0.1)
    await link.close()
    with pytest.raises(LinkError):
        await scheduling
    await cancelling
    assert await probing is ProbeResult.GONE


async def test_a_probe_knows_another_worker_by_its_incarnation(silent, monkeypatch):
    for incarnation, found in (("i", ProbeResult.ALIVE), ("j", ProbeResult.GONE)):
        async with linked(Answering(incarnation)) as link:
            assert await link.probe() is found
    monkeypatch.setattr(worker_link, "PROBE_S", 0.1)
    assert await silent[1].probe() is ProbeResult.UNKNOWN, "without an answer it decides nothing"


async def test_an_adapter_without_room_closes_no_worker_to_others():
    for error, closed in (
        (errors.OutOfBlocks("full"), True),
        (errors.NoAdapterRoom("full"), False),
        (errors.Loading("being read"), False),
    ):
        later = AdmissionAnswer(AdmissionOutcome.LATER, error.failure())
        async with linked(Answering(answer=later)) as link:
            assert await link.schedule(ADMISSION, follow=False) == later
            assert link._declined is closed


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL])
async def test_a_call_says_whether_its_connection_broke(code):
    class Ending(Answering):
        async def Schedule(self, request, context):
            await context.abort(code, "")

    async with linked(Ending()) as link:
        with pytest.raises(LinkError) as caught:
            await link.schedule(ADMISSION, follow=False)
        assert caught.value.lost_connection is (code is grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize(("step", "who"), [(-1, "worker"), (0, ""), (1, "router")])
async def test_a_router_uses_workers_of_its_own_revision(step, who):
    revision = INTERNAL_REVISION + step
    async with linked(Answering(revision=revision)) as link:
        opening = asyncio.create_task(link.keep_open(on_broken=lambda _: asyncio.sleep(0)))
        await until(lambda: link.hello and link.unusable_reason != "not met yet")
        if who:
            said = f"speaks internal revision {revision}, this router {INTERNAL_REVISION}: upgrade the {who}"
            assert (link.unusable_reason, link.facts) == (said, None)
        else:
            await until(lambda: link.facts)
            assert "revision" not in link.unusable_reason
        opening.cancel()


async def test_a_drain_that_fails_is_a_typed_error():
    class Slow(worker_pb2_grpc.WorkerServicer):
        async def Drain(self, request, context):
            yield worker_pb2.DrainResponse(num_left=1)
            await asyncio.sleep(60)

    for servicer, error in (
        (WorkerService("w", Incarnation("i")), errors.Loading),  # its own error passes
        (worker_pb2_grpc.WorkerServicer(), errors.Unreachable),  # an older worker: UNIMPLEMENTED, without details
    ):
        async with linked(servicer) as link:
            with pytest.raises(error):
                await anext(link.drain(0, undo=False))
    async with linked(Slow()) as link:
        drain = link.drain(0, undo=False)
        assert (await anext(drain)).num_left == 1
        await link.close()  # it is removed
        with pytest.raises(errors.Unreachable, match="has ended"):
            await anext(drain)
        with pytest.raises(errors.Unreachable, match="has ended"):
            await anext(link.drain(0, undo=False))
