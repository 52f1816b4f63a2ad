"""A request goes on while one of its clients is there, whichever of its routers die, hang, or come back."""

import time
from contextlib import AsyncExitStack

import pytest
from live.cluster import Shape
from live.fixtures import whole
from waiting import until

from octavo.client import FinishReason
from octavo.request.ids import sequence_id
from octavo.store import open_store

pytestmark = pytest.mark.long

LEASE_S, GRACE_S = 1.5, 1.5
SHAPE = Shape(step_delay_ms=15, lease_ms=int(1000 * LEASE_S), router_args=("--grace-ms", str(int(1000 * GRACE_S))))
GONE_S = LEASE_S + GRACE_S + 3.0  # by then a request that nobody is attached to has been cancelled


@pytest.fixture
def cluster(clusters):
    yield from whole(clusters(SHAPE))


async def read_on(stream, seconds):
    """Reads a stream that must not end within that time."""
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        event = await anext(stream)
        assert not event.finish_reason, f"ended {event.finish_reason.name}"


@pytest.mark.timeout(180)
async def test_the_death_of_the_router_that_attached_last_ends_nothing(cluster):
    async with cluster.client([0]) as one, cluster.client([1]) as two:
        stream = one.generate("Hello", max_tokens=8000, temperature=0, ignore_eos=True)
        await anext(stream)
        other = two.attach(stream.request_id)
        await anext(other)
        cluster.kill("r1")
        await read_on(stream, GONE_S)
        await one.cancel(stream.request_id)
        assert [event async for event in stream][-1].finish_reason is FinishReason.CANCELLED
        await other.aclose()


@pytest.mark.timeout(180)
async def test_a_router_that_hung_for_longer_than_its_lease_attaches_its_clients_again(cluster):
    """The other router has detached them meanwhile."""
    store = open_store(cluster.store.url)
    await store.open()
    async with AsyncExitStack() as stack, cluster.client([0]) as one, cluster.client([1]) as two:
        stack.push_async_callback(store.close)
        stream = one.generate("Hello", max_tokens=8000, temperature=0, ignore_eos=True)
        await anext(stream)
        cluster.pause("r0")
        await until(lambda: is_detached(store, stream.request_id))
        cluster.resume("r0")
        await read_on(stream, GONE_S)
        await two.cancel(stream.request_id)
        assert [event async for event in stream][-1].finish_reason is FinishReason.CANCELLED


async def is_detached(store, request_id):
    snapshot = await store.read(sequence_id("", request_id))
    return not snapshot.record.routers
