"""What the function library remembers of running sequences: appends are cheap, and never trust it too long."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from octavo.ids import Incarnation
from octavo.record import NewSequence
from octavo.sampling import FinishReason
from octavo.store import keys
from octavo.store.calls import AppendItem, AppendStatus, Finish, QueueLimits, TakeReason, TakeRequest
from octavo.store.embedded import EmbeddedStore
from octavo.store.worker_tail import MAX_BATCH

W1, W2 = Incarnation("worker1"), Incarnation("worker2")
New = Callable[..., NewSequence]


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest, servers: Callable[[str], EmbeddedStore]) -> EmbeddedStore:
    return servers(request.param)


@pytest.fixture
async def store(server: EmbeddedStore, make_redis_bench: Callable[..., Any]) -> AsyncIterator[Any]:
    bench = await make_redis_bench(server.url)
    yield bench.store
    await bench.close()


async def begin(store: Any, new: NewSequence, tokens: int = 2) -> None:
    """A running sequence whose journal has tokens, so that the library remembers it."""
    await store.accept(new, QueueLimits())
    await store.take_ownership(TakeRequest(new.seq_id, 0, W1, "t", TakeReason.QUEUED))
    assert await append(store, new, 0, list(range(tokens))) is AppendStatus.OK


async def append(store: Any, new: NewSequence, first: int, tokens: list[int], owner: Incarnation = W1) -> AppendStatus:
    (reply,) = await store.append_batch(owner, [AppendItem(new.seq_id, 1, 0, first, tokens)])
    return reply.status


async def calls_of(store: Any) -> dict[str, int]:
    stats = await store.server.client.info("commandstats")
    return {name.removeprefix("cmdstat_"): entry["calls"] for name, entry in stats.items()}


async def test_an_append_in_order_is_one_call_of_the_server(store: Any, new: New) -> None:
    sequence = new("s", max_tokens=100)
    await begin(store, sequence)
    await store.server.client.config_resetstat()
    for first in range(2, 22, 2):
        assert await append(store, sequence, first, [7, 8]) is AppendStatus.OK
    calls = await calls_of(store)
    assert calls["append"] == calls["fcall"] == 10
    assert not {"hmget", "strlen", "hgetall", "hset"} & set(calls)


async def test_what_is_out_of_order_is_compared_with_the_journal(store: Any, new: New) -> None:
    sequence = new("s", max_tokens=5)
    await begin(store, sequence)
    assert await append(store, sequence, 0, [0, 1]) is AppendStatus.DUP
    assert await append(store, sequence, 1, [9]) is AppendStatus.CONFLICT
    assert await append(store, sequence, 3, [9]) is AppendStatus.GAP
    assert await append(store, sequence, 2, [9], W2) is AppendStatus.FENCED
    assert await append(store, sequence, 2, [2, 3, 4, 5]) is AppendStatus.CONFLICT  # more than max_tokens
    assert await append(store, sequence, 2, [2, 3, 4]) is AppendStatus.OK
    assert (await store.read(sequence.seq_id, from_indexes=[0])).outputs == ((0, 1, 2, 3, 4),)


async def test_every_change_of_the_record_is_seen_by_the_next_append(store: Any, new: New) -> None:
    cancelled, requeued, ended = new("c"), new("r"), new("e")
    for sequence in (cancelled, requeued, ended):
        await begin(store, sequence)
    await store.cancel(cancelled.seq_id)
    await store.requeue(requeued.seq_id, 1)
    await store.finish(Finish(ended.seq_id, FinishReason.STOP))
    assert await append(store, cancelled, 2, [2]) is AppendStatus.OK_CANCEL
    assert await append(store, requeued, 2, [2]) is AppendStatus.FENCED
    assert await append(store, ended, 2, [2]) is AppendStatus.CLOSED


async def test_a_record_that_an_operator_deleted_gets_no_journal_again(store: Any, new: New) -> None:
    sequence = new("s")
    await begin(store, sequence)
    record = keys.record(sequence.seq_id)
    await store.server.client.delete(record, f"{record}:0")
    assert await append(store, sequence, 2, [2]) is AppendStatus.GONE
    assert await store.server.client.exists(f"{record}:0") == 0


async def test_a_journal_that_an_operator_cut_is_a_gap_and_keeps_what_it_has(store: Any, new: New) -> None:
    sequence = new("s")
    await begin(store, sequence)
    journal = f"{keys.record(sequence.seq_id)}:0"
    await store.server.client.set(journal, (0).to_bytes(4, "little"), keepttl=True)
    assert await append(store, sequence, 2, [2]) is AppendStatus.GAP
    assert await store.server.client.get(journal) == (0).to_bytes(4, "little")
    assert await store.server.client.pttl(journal) > 0
    assert await append(store, sequence, 1, [1, 2]) is AppendStatus.OK


async def test_after_the_loss_of_all_data_nothing_is_remembered(store: Any, new: New) -> None:
    sequence = new("s")
    await begin(store, sequence)
    await store.server.client.flushall()
    await store.server.client.set("octavo:test-clock", 1_000_000_000_000)
    assert await append(store, sequence, 2, [2]) is AppendStatus.GONE
    assert await store.server.client.keys("octavo:seq:*") == []


async def test_a_large_batch_goes_in_several_calls(store: Any, new: New) -> None:
    sequence = new("s", max_tokens=2000)
    await begin(store, sequence)
    await store.server.client.config_resetstat()
    items = [AppendItem(sequence.seq_id, 1, 0, index, [7]) for index in range(2, 2 + 2 * MAX_BATCH + 1)]
    replies = await store.append_batch(W1, items)
    assert {reply.status for reply in replies} == {AppendStatus.OK}
    assert (await calls_of(store))["fcall"] == 3
    assert MAX_BATCH <= 512
