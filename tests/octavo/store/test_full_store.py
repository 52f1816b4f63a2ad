"""A server that has used up its memory: what was accepted goes on to its end, and only new requests are refused."""

import asyncio
from dataclasses import replace

import pytest

from octavo.local.embedded import EmbeddedStore
from octavo.request.errors import StoreFull
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import SequenceState
from octavo.request.sampling import FinishReason
from octavo.store import open_store
from octavo.store.calls import AcceptStatus, AppendItem, AppendStatus, Member, QueueLimits, TakeReason, TakeRequest
from octavo.store.codec import record_key

STEP = 2500  # tokens of an append
W1, ROUTER = Incarnation("worker1"), Incarnation("router1")
UNBOUNDED = QueueLimits(10**9, 10**12)
PROMPT = tuple(range(16_384))  # 64 KiB in the store
RETAIN_MS = 600_000
RECENT_MS = RETAIN_MS // 2  # with this retention, a record that was kept for RETAIN_MS seems to have ended just now
SETTLED_MS = 10 * RETAIN_MS  # with this retention, a record that was kept for RETAIN_MS seems to have ended long ago


@pytest.fixture
async def server(tmp_path):
    server = EmbeddedStore(tmp_path, memory_bytes=16 * 2**20)
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def store(server):
    store = open_store(server.url, retain_ms=RETAIN_MS)
    await store.open()
    yield store
    await store.close()


async def fill(store, new):
    """Accepts requests until one is refused; those that were accepted."""
    accepted = []
    for number in range(1000):
        request = new(f"fill{number}", seq_id=SequenceId(f"{number:032x}"), prompt=PROMPT, max_tokens=STEP)
        try:
            await store.accept(request, UNBOUNDED)
        except StoreFull:
            return accepted
        accepted.append(request)
    pytest.fail("the store has no bound")


async def compute(store, seq_id, count, step=STEP):
    """Takes a sequence, and ends it after so many tokens and another step."""
    assert (await store.take_ownership(TakeRequest(seq_id, 0, W1, "t", TakeReason.QUEUED))).epoch == 1
    for first in range(0, count + 1, step):
        end = FinishReason.LENGTH if first == count else FinishReason.NONE
        [reply] = await store.append_batch(W1, [AppendItem(seq_id, 1, 0, first, list(range(step)), end)])
        assert reply.status is AppendStatus.OK


async def test_a_full_store_lets_running_sequences_end(store, new):
    running = new(max_tokens=100_000)
    await store.accept(running, UNBOUNDED)
    assert await store.accepting()
    waiting = await fill(store, new)
    assert len(waiting) > 20
    with pytest.raises(StoreFull) as caught:
        await store.accept(new("one more", prompt=PROMPT), UNBOUNDED)
    assert caught.value.retry_after_ms > 0
    assert (await store.accept(waiting[0], UNBOUNDED)).status is AcceptStatus.EXISTS
    assert (await store.accept(replace(waiting[0], body_hash=b"other"), UNBOUNDED)).status is AcceptStatus.MISMATCH
    assert not await store.accepting()
    await store.heartbeat(Member("router", ROUTER, b"r"), 3000)
    assert await store.attach(running.seq_id, ROUTER) is not None
    await compute(store, running.seq_id, 20_000)  # beyond the bound
    snapshot = await store.read(running.seq_id, from_indexes=[0])
    assert snapshot.record.state is SequenceState.DONE
    assert snapshot.outputs[0] == tuple(range(STEP)) * 9
    for request in waiting[:30]:  # one of them that ends gives back its prompt
        await compute(store, request.seq_id, 0)
    assert await store.accepting()
    assert (await store.accept(new("later"), UNBOUNDED)).status is AcceptStatus.OK


async def stays_full(store):
    """Whether it is full of records, and not of buffers, which the server gives back within moments."""
    for _ in range(5):
        if await store.accepting():
            return False
        await asyncio.sleep(0.2)
    return True


async def sweep_as(server, retain_ms):
    store = open_store(server.url, retain_ms=retain_ms)
    await store.open()
    await store.sweep(10, 1000, 0)
    await store.close()


async def test_short_memory_removes_the_oldest_ended_records(server, store, new):
    """And last what is to be kept: every other one."""
    ended = []
    while not await stays_full(store):
        number, seq_id = len(ended), SequenceId(f"e{len(ended):031x}")
        retain_ms = 0 if number % 2 else RETAIN_MS
        await store.accept(new(f"e{number}", seq_id=seq_id, max_tokens=100_000, retain_ms=retain_ms), UNBOUNDED)
        await compute(store, seq_id, 40_000, 10_000)
        ended.append(seq_id)

    async def left():
        return [await store.read(seq_id) is not None for seq_id in ended]

    assert len(ended) > 50
    await store.heartbeat(Member("worker", W1, b""), 60_000)  # the sweep would remove the tail of a dead worker
    await sweep_as(server, RECENT_MS)
    assert not await store.accepting()  # all of them ended just now: their clients may come back
    for seq_id in ended[::2]:  # by their own retention, too, they have ended long ago
        await store.server.client.pexpire(record_key(seq_id), RETAIN_MS // 2)
    await sweep_as(server, SETTLED_MS)
    assert await store.accepting()
    found = await left()
    kept, usual = found[::2], found[1::2]
    assert all(kept), "one that is to be kept went while there were others"
    assert usual == sorted(usual), "a younger record went before an older one"
    assert 0 < sum(usual) < len(usual)
    await store.accept(new("alive"), UNBOUNDED)
    await sweep_as(server, SETTLED_MS)
    assert await left() == found, "there was no need"
    assert await store.read(new("alive").seq_id) is not None
