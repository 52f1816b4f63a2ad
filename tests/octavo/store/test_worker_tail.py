"""What a worker has in its tail counts as its journals do, whatever happens to the record, the server or the call."""

import pytest

from octavo.request.ids import Incarnation
from octavo.request.sampling import FinishReason
from octavo.store import codec, worker_tail
from octavo.store.calls import AppendItem, AppendStatus, Finish, Member, TakeReason

W1, W2 = Incarnation("worker1"), Incarnation("worker2")
HOUR_MS = 3600 * 1000
TAIL = f"octavo:tail:{W1}"


@pytest.fixture
def running(server_bench, new):
    """Begins sequences whose journal has two tokens, so that the library remembers it."""

    async def begin(*names):
        for name in names:
            await server_bench.run(new(name, max_tokens=100))
            assert (await server_bench.append(new(name).seq_id, 1, 0, [0, 1])).status is AppendStatus.OK
        return [new(name).seq_id for name in names]

    return begin


async def output(store, seq_id):
    return list((await store.read(seq_id, from_indexes=[0])).outputs[0])


async def test_appends_of_many_sequences_are_one_write(store, running):
    ids = await running(*"abcdefghij")
    await store.server.client.config_resetstat()
    for first in range(2, 22, 2):
        replies = await store.append_batch(W1, [AppendItem(each, 1, 0, first, [first, first + 1]) for each in ids])
        assert [(reply.status, reply.length) for reply in replies] == [(AppendStatus.OK, first + 2)] * 10
    stats = await store.server.client.info("commandstats")
    assert stats["cmdstat_append"]["calls"] == stats["cmdstat_fcall"]["calls"] == 10
    assert not {f"cmdstat_{name}" for name in ("hmget", "strlen", "hgetall", "hset")} & set(stats)
    for each in ids:
        assert await output(store, each) == list(range(22))


async def test_a_checkpoint_empties_the_tail(store, running, monkeypatch):
    monkeypatch.setattr(worker_tail, "MAX_TAIL_BYTES", 500)
    monkeypatch.setattr(worker_tail, "MAX_BATCH", 3)
    ids, sizes = await running(*"abcdefg"), []
    for first in range(2, 42):
        replies = await store.append_batch(W1, [AppendItem(each, 1, 0, first, [first]) for each in ids])
        assert {reply.status for reply in replies} == {AppendStatus.OK}
        sizes.append(await store.server.client.strlen(TAIL))
    assert sizes.count(0) > 5
    assert max(sizes) < 1000
    for each in ids:
        assert len(await store.server.client.get(f"{codec.record_key(each)}:0")) // 4 >= 30
        assert await output(store, each) == list(range(42))


async def test_a_tail_lives_as_long_as_its_worker_and_tokens_as_their_record(server_bench, store, running):
    """However long ago the tail began; and although nobody takes the sequence, and nobody renews the tail."""
    [seq_id] = await running("s")
    await server_bench.append(seq_id, 1, 2, [2])
    names = [TAIL, "octavo:tails"]
    for name in names:
        await store.server.client.pexpire(name, HOUR_MS)
    await store.heartbeat(Member("worker", W1, b"", "", ""), 2000)
    assert min([await store.server.client.pttl(name) for name in names]) > 23 * HOUR_MS
    await server_bench.advance(13 * HOUR_MS)
    await store.heartbeat(Member("router", Incarnation("router1"), b""), 2000)  # so that nothing changes the record
    await store.sweep(100, 1000)
    await store.server.client.delete(TAIL)
    assert await output(store, seq_id) == [0, 1, 2]


async def test_the_tail_of_a_gone_worker_goes(server_bench, store, running):
    ended, taken = await running("s", "t")
    for each in (ended, taken):
        await server_bench.append(each, 1, 2, [2])
    await store.finish(Finish(ended, FinishReason.STOP))
    await server_bench.take(taken, 1, W2, TakeReason.LEASE)
    await server_bench.advance(1000)
    await store.sweep(100, 1000)
    assert await store.server.client.exists(TAIL, "octavo:tails") == 0
    assert (await server_bench.append(taken, 1, 3, [3])).status is AppendStatus.FENCED  # it only slept
    assert await output(store, taken) == [0, 1, 2]
