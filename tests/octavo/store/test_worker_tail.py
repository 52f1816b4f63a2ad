"""What a worker has in its tail counts as its journals do, whatever happens to the record, the server or the call."""

from typing import Any

import pytest

from octavo.request.ids import Incarnation
from octavo.request.record import NewSequence
from octavo.request.sampling import FinishReason
from octavo.store import calls, codec, worker_tail

W1, W2 = Incarnation("worker1"), Incarnation("worker2")
HOUR_MS = 3600 * 1000


async def begin(store: Any, new: NewSequence, tokens: int = 2) -> None:
    """A running sequence whose journal has tokens, so that the library remembers it."""
    await store.accept(new, calls.QueueLimits())
    await store.take_ownership(calls.TakeRequest(new.seq_id, 0, W1, "t", calls.TakeReason.QUEUED))
    assert await append(store, new, 0, list(range(tokens))) is calls.AppendStatus.OK


async def append(
    store: Any, new: NewSequence, first: int, tokens: list[int], owner: Incarnation = W1
) -> calls.AppendStatus:
    (reply,) = await store.append_batch(owner, [calls.AppendItem(new.seq_id, 1, 0, first, tokens)])
    return reply.status


async def calls_of(store: Any) -> dict[str, int]:
    stats = await store.server.client.info("commandstats")
    return {name.removeprefix("cmdstat_"): entry["calls"] for name, entry in stats.items()}


async def tail_bytes(store: Any) -> int:
    return int(await store.server.client.strlen(f"octavo:tail:{W1}"))


async def output(store: Any, new: NewSequence) -> list[int]:
    return list((await store.read(new.seq_id, from_indexes=[0])).outputs[0])


async def test_appends_of_many_sequences_are_one_write(store: Any, new: Any) -> None:
    sequences = [new(str(number), max_tokens=100) for number in range(10)]
    for sequence in sequences:
        await begin(store, sequence)
    await store.server.client.config_resetstat()
    for first in range(2, 22, 2):
        items = [calls.AppendItem(sequence.seq_id, 1, 0, first, [first, first + 1]) for sequence in sequences]
        replies = await store.append_batch(W1, items)
        assert [(reply.status, reply.length) for reply in replies] == [(calls.AppendStatus.OK, first + 2)] * 10
    counted = await calls_of(store)
    assert counted["append"] == counted["fcall"] == 10
    assert not {"hmget", "strlen", "hgetall", "hset"} & set(counted)
    for sequence in sequences:
        assert await output(store, sequence) == list(range(22))


async def test_a_checkpoint_empties_the_tail(store: Any, new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_tail, "MAX_TAIL_BYTES", 500)
    monkeypatch.setattr(worker_tail, "MAX_BATCH", 3)
    sequences = [new(str(number), max_tokens=100) for number in range(7)]
    for sequence in sequences:
        await begin(store, sequence)
    sizes = []
    for first in range(2, 42):
        items = [calls.AppendItem(sequence.seq_id, 1, 0, first, [first]) for sequence in sequences]
        assert {reply.status for reply in await store.append_batch(W1, items)} == {calls.AppendStatus.OK}
        sizes.append(await tail_bytes(store))
    assert sizes.count(0) > 5
    assert max(sizes) < 1000
    for sequence in sequences:
        journal = await store.server.client.get(f"{codec.record_key(sequence.seq_id)}:0")
        assert len(journal) // 4 >= 30
        assert await output(store, sequence) == list(range(42))


async def test_a_tail_lives_as_long_as_its_worker(store: Any, new: Any) -> None:
    """However long ago it began: tokens that are a minute old must not go with it."""
    sequence = new("s")
    await begin(store, sequence)
    assert await append(store, sequence, 2, [2]) is calls.AppendStatus.OK
    names = [f"octavo:tail:{W1}", "octavo:tails"]
    for name in names:
        await store.server.client.pexpire(name, HOUR_MS)
    await store.heartbeat(calls.Member("worker", W1, b"", "", ""), 2000)
    assert min([await store.server.client.pttl(name) for name in names]) > 23 * HOUR_MS


async def test_tokens_live_as_long_as_their_record(server_bench: Any, store: Any, new: Any) -> None:
    """Although nobody takes it, and nobody renews the tail."""
    sequence = new("s")
    await begin(store, sequence)
    assert await append(store, sequence, 2, [2]) is calls.AppendStatus.OK
    await server_bench.advance(13 * HOUR_MS)
    await store.heartbeat(
        calls.Member("router", Incarnation("router1"), b""), 2000
    )  # so that nothing changes the record
    await store.sweep(100, 1000)
    await store.server.client.delete(f"octavo:tail:{W1}")
    assert await output(store, sequence) == [0, 1, 2]


async def test_the_tail_of_a_gone_worker_goes(server_bench: Any, store: Any, new: Any) -> None:
    sequence, taken = new("s"), new("t")
    for each in (sequence, taken):
        await begin(store, each)
        assert await append(store, each, 2, [2]) is calls.AppendStatus.OK
    await store.finish(calls.Finish(sequence.seq_id, FinishReason.STOP))
    await store.take_ownership(calls.TakeRequest(taken.seq_id, 1, W2, "u", calls.TakeReason.LEASE))
    await server_bench.advance(1000)
    await store.sweep(100, 1000)
    assert await tail_bytes(store) == 0
    assert await store.server.client.exists("octavo:tails") == 0
    assert await append(store, taken, 3, [3]) is calls.AppendStatus.FENCED  # it only slept
    assert await output(store, taken) == [0, 1, 2]
