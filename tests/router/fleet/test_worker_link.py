"""A link whose worker does not answer, or is parted with while somebody waits for its answer."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from octavo import rpc
from octavo.ids import Incarnation, SequenceId
from octavo.record import Admission
from octavo.sampling import SamplingParams
from octavo.store.calls import Member
from octavo.v1 import worker_pb2_grpc
from router.fleet.kv_index import KvIndex
from router.fleet.model_registry import ModelRegistry
from router.fleet.worker_link import LinkError, ProbeResult, WorkerLink
from router.session_registry import SessionRegistry

ADMISSION = Admission(
    seq_id=SequenceId("a" * 32),
    epoch=1,
    prompt=[1],
    sampling=SamplingParams(seed=1),
)


class Silent(worker_pb2_grpc.WorkerServicer):
    """Takes calls, and answers none."""

    def __init__(self) -> None:
        self.called = asyncio.Event()

    async def Schedule(self, request, context):
        self.called.set()
        await asyncio.sleep(60)

    Cancel = Hello = Schedule


@pytest.fixture
async def silent() -> AsyncIterator[tuple[Silent, WorkerLink]]:
    servicer, server = Silent(), rpc.server(internal=True)
    worker_pb2_grpc.add_WorkerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    described = {"worker_id": "w", "endpoint": f"127.0.0.1:{port}"}
    member = Member("worker", Incarnation("i"), json.dumps(described).encode())
    link = WorkerLink(member, "r", SessionRegistry(), ModelRegistry(), KvIndex())
    yield servicer, link
    await link.close()
    await server.stop(0)


async def test_who_waits_for_a_worker_that_is_parted_with_goes_on(silent):
    """Being told that the link is broken, and not being cancelled with it."""
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


async def test_a_closed_link_says_so(silent):
    _, link = silent
    await link.close()
    with pytest.raises(LinkError):
        await link.schedule(ADMISSION, follow=False)
    await link.cancel_sequence(ADMISSION.seq_id, 1)
    assert await link.probe() is ProbeResult.GONE


async def test_who_is_cancelled_while_waiting_is_cancelled(silent):
    servicer, link = silent
    scheduling = asyncio.create_task(link.schedule(ADMISSION, follow=False))
    await servicer.called.wait()
    scheduling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await scheduling
