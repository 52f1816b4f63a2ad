"""However many calls wait for the connections of requests: leases, attachments and owners have their own."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from octavo.local.embedded import EmbeddedStore
from octavo.request.ids import Incarnation
from octavo.request.record import NewSequence
from octavo.store import library
from octavo.store.calls import (
    AppendItem,
    AppendStatus,
    Member,
    QueueLimits,
    TakeReason,
    TakeRequest,
    TakeStatus,
)
from octavo.store.connection_pools import POOLS
from octavo.store.redis import RedisStore
from octavo.store.redis_server import RedisOptions

ROUTER, WORKER = Incarnation("router1"), Incarnation("worker1")
NUM_READS = 500  # as many as unread streams
NUM_CALLS = 40  # of each kind at once: more than its connections
New = Callable[..., NewSequence]


@pytest.fixture
def url(servers: Callable[[str], EmbeddedStore]) -> str:
    return servers("valkey").url


@pytest.fixture
async def store(url: str) -> AsyncIterator[RedisStore]:
    made = RedisStore(url, RedisOptions(connect_timeout_s=30, call_timeout_s=60))
    await made.server.client.flushall()
    await made.server.client.function_flush()  # of tests that set the time by hand
    await made.open()
    yield made
    await made.close()


@asynccontextmanager
async def full_pool(store: RedisStore) -> AsyncIterator[asyncio.Future[Any]]:
    """While all connections of requests are held; the value is the reads that wait for one."""
    num_held, beside = RedisOptions().max_connections, store.server._pools.client_of("octavo1_heartbeat")
    held = [asyncio.create_task(store.server.client.blpop("octavo:test-held")) for _ in range(num_held)]
    while (await beside.info("clients"))["blocked_clients"] < num_held:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    reads = asyncio.gather(*(store.queue_depth() for _ in range(NUM_READS)))
    yield reads
    await beside.rpush("octavo:test-held", *(["go"] * num_held))
    await asyncio.gather(*held, reads)


def test_every_function_with_its_own_connections_exists() -> None:
    named = [function for _, functions in POOLS.values() for function in functions]
    assert len(set(named)) == len(named)
    assert [each for each in named if f"'{each}'" not in library.source()] == []


async def test_leases_takes_and_attachments_need_no_other_connection(store: RedisStore, new: New) -> None:
    fresh = [new(str(number), router=ROUTER) for number in range(NUM_CALLS)]
    for each in fresh:
        await store.accept(each, QueueLimits())
    member = Member("worker", WORKER, b"w", "worker-0", "h:1")
    async with full_pool(store) as reads:
        leases = [store.heartbeat(member, 3000) for _ in fresh]
        takes = [store.take_ownership(TakeRequest(each.seq_id, 0, WORKER, "t", TakeReason.QUEUED)) for each in fresh]
        outbox = [store.attach(each.seq_id, ROUTER) for each in fresh]
        renewed, taken, attached = await asyncio.gather(*map(_all, (leases, takes, outbox)))
        items = [AppendItem(each.seq_id, 1, 0, 0, [1, 2]) for each in fresh]
        appended = await store.append_batch(WORKER, items)
        told = await store.note_progress(fresh[0].seq_id, 1, WORKER, 16)
        await store.sweep(10, 1000)
        assert not reads.done()  # the pool was full all the time
    assert not any(each.holder for each in renewed)
    assert {each.status for each in taken} == {TakeStatus.OK}
    assert all(attached)
    assert {told, *(each.status for each in appended)} == {AppendStatus.OK}


async def _all(calls: list[Any]) -> list[Any]:
    return await asyncio.gather(*calls)
