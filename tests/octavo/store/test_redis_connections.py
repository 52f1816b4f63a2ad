"""However many calls wait for the connections of requests: leases, attachments and owners have their own."""

import asyncio
from contextlib import asynccontextmanager

from octavo.request.ids import Incarnation
from octavo.store.calls import AppendItem, AppendStatus, Member, QueueLimits, TakeReason, TakeRequest, TakeStatus
from octavo.store.redis_server import RedisOptions

ROUTER, WORKER = Incarnation("router1"), Incarnation("worker1")
NUM_READS = 500  # as many as unread streams
NUM_CALLS = 40  # of each kind at once: more than its connections
MOST = RedisOptions().max_connections


@asynccontextmanager
async def full_pool(store):
    """While all connections of requests are held; the value is the reads that wait for one."""
    beside = store.server._pools.client_of("octavo1_heartbeat")
    held = [asyncio.create_task(store.server.client.blpop("octavo:test-held")) for _ in range(MOST)]
    while (await beside.info("clients"))["blocked_clients"] < MOST:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    reads = asyncio.gather(*(store.queue_depth() for _ in range(NUM_READS)))
    yield reads
    await beside.rpush("octavo:test-held", *(["go"] * MOST))
    await asyncio.gather(*held, reads)


async def test_leases_takes_and_attachments_need_no_other_connection(store, new):
    fresh = [new(str(number), router=ROUTER) for number in range(NUM_CALLS)]
    for each in fresh:
        await store.accept(each, QueueLimits())
    member = Member("worker", WORKER, b"w", "worker-0", "h:1")
    async with full_pool(store) as reads:
        leases = [store.heartbeat(member, 3000) for _ in fresh]
        takes = [store.take_ownership(TakeRequest(each.seq_id, 0, WORKER, "t", TakeReason.QUEUED)) for each in fresh]
        outbox = [store.attach(each.seq_id, ROUTER) for each in fresh]
        renewed, taken, attached = await asyncio.gather(*(asyncio.gather(*calls) for calls in (leases, takes, outbox)))
        appended = await store.append_batch(WORKER, [AppendItem(each.seq_id, 1, 0, 0, [1, 2]) for each in fresh])
        await store.sweep(10, 1000)
        assert not reads.done()  # the pool was full all the time
    assert not any(each.holder for each in renewed)
    assert {each.status for each in taken} == {TakeStatus.OK}
    assert all(attached)
    assert {each.status for each in appended} == {AppendStatus.OK}
