"""What a worker has in its tail counts as its journals do, whatever happens to the record, the server or the call."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from octavo.local.embedded import EmbeddedStore
from octavo.request.ids import Incarnation
from octavo.request.record import NewSequence
from octavo.request.sampling import FinishReason
from octavo.store import codec, keys, library, worker_tail
from octavo.store.calls import (
    AppendItem,
    AppendStatus,
    Finish,
    Member,
    QueueLimits,
    TakeReason,
    TakeRequest,
)
from octavo.store.redis import RedisStore
from octavo.store.worker_tail import MAX_BATCH, MAX_TAIL_BYTES

W1, W2 = Incarnation("worker1"), Incarnation("worker2")
New = Callable[..., NewSequence]
HOUR_MS = 3600 * 1000


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


async def tail_bytes(store: Any) -> int:
    return int(await store.server.client.strlen(f"octavo:tail:{W1}"))


async def output(store: Any, new: NewSequence) -> list[int]:
    return list((await store.read(new.seq_id, from_indexes=[0])).outputs[0])


async def test_appends_of_many_sequences_are_one_write(store: Any, new: New) -> None:
    sequences = [new(str(number), max_tokens=100) for number in range(10)]
    for sequence in sequences:
        await begin(store, sequence)
    await store.server.client.config_resetstat()
    for first in range(2, 22, 2):
        items = [AppendItem(sequence.seq_id, 1, 0, first, [first, first + 1]) for sequence in sequences]
        replies = await store.append_batch(W1, items)
        assert [(reply.status, reply.length) for reply in replies] == [(AppendStatus.OK, first + 2)] * 10
    calls = await calls_of(store)
    assert calls["append"] == calls["fcall"] == 10
    assert not {"hmget", "strlen", "hgetall", "hset"} & set(calls)
    for sequence in sequences:
        assert await output(store, sequence) == list(range(22))


async def test_a_checkpoint_empties_the_tail(store: Any, new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_tail, "MAX_TAIL_BYTES", 500)
    monkeypatch.setattr(worker_tail, "MAX_BATCH", 3)
    sequences = [new(str(number), max_tokens=100) for number in range(7)]
    for sequence in sequences:
        await begin(store, sequence)
    sizes = []
    for first in range(2, 42):
        items = [AppendItem(sequence.seq_id, 1, 0, first, [first]) for sequence in sequences]
        assert {reply.status for reply in await store.append_batch(W1, items)} == {AppendStatus.OK}
        sizes.append(await tail_bytes(store))
    assert sizes.count(0) > 5
    assert max(sizes) < 1000
    for sequence in sequences:
        journal = await store.server.client.get(f"{keys.record(sequence.seq_id)}:0")
        assert len(journal) // 4 >= 30
        assert await output(store, sequence) == list(range(42))


async def test_what_is_out_of_order_is_compared_with_what_was_appended(store: Any, new: New) -> None:
    sequence = new("s", max_tokens=6)
    await begin(store, sequence)
    assert await append(store, sequence, 2, [2]) is AppendStatus.OK  # into the tail
    assert await append(store, sequence, 1, [1, 2]) is AppendStatus.DUP
    assert await append(store, sequence, 2, [9]) is AppendStatus.CONFLICT
    assert await append(store, sequence, 4, [9]) is AppendStatus.GAP
    assert await append(store, sequence, 3, [9], W2) is AppendStatus.FENCED
    assert await append(store, sequence, 3, [3, 4, 5, 6]) is AppendStatus.CONFLICT  # more than max_tokens
    assert await append(store, sequence, 3, [3]) is AppendStatus.OK
    assert await append(store, sequence, 4, [4, 5]) is AppendStatus.OK
    assert await append(store, sequence, 6, [6]) is AppendStatus.CONFLICT
    assert await output(store, sequence) == [0, 1, 2, 3, 4, 5]


async def test_every_change_of_the_record_is_seen_by_the_next_append(store: Any, new: New) -> None:
    names = ["cancelled", "requeued", "ended", "taken", "unharmed"]
    cancelled, requeued, ended, taken, unharmed = (new(name) for name in names)
    for sequence in (cancelled, requeued, ended, taken, unharmed):
        await begin(store, sequence)
        assert await append(store, sequence, 2, [2]) is AppendStatus.OK
    await store.cancel(cancelled.seq_id)
    await store.requeue(requeued.seq_id, 1)
    await store.finish(Finish(ended.seq_id, FinishReason.STOP))
    assert (await store.take_ownership(TakeRequest(taken.seq_id, 1, W2, "u", TakeReason.LEASE))).epoch == 2
    items = [AppendItem(s.seq_id, 1, 0, 3, [3]) for s in (cancelled, requeued, ended, taken, unharmed)]
    assert [reply.status for reply in await store.append_batch(W1, items)] == [
        AppendStatus.OK_CANCEL, AppendStatus.FENCED, AppendStatus.CLOSED, AppendStatus.FENCED, AppendStatus.OK
    ]  # fmt: skip
    for sequence in (requeued, ended, taken):
        assert await output(store, sequence) == [0, 1, 2]
    assert await append(store, unharmed, 4, [4]) is AppendStatus.OK
    assert await tail_bytes(store) > 0
    (reply,) = await store.append_batch(W2, [AppendItem(taken.seq_id, 2, 0, 3, [7])])
    assert (reply.status, reply.length) == (AppendStatus.OK, 4)


async def test_an_end_takes_what_is_in_the_tail_with_it(store: Any, new: New) -> None:
    sequence = new("s", num_branches=2)
    await begin(store, sequence)
    for first in range(2, 6):
        assert await append(store, sequence, first, [first]) is AppendStatus.OK
    end = AppendItem(sequence.seq_id, 1, 0, 6, [6], FinishReason.LENGTH)
    other = AppendItem(sequence.seq_id, 1, 1, 0, [8])
    assert [reply.status for reply in await store.append_batch(W1, [end, other])] == [AppendStatus.OK] * 2
    for first in range(1, 4):
        [reply] = await store.append_batch(W1, [AppendItem(sequence.seq_id, 1, 1, first, [8])])
        assert reply.status is AppendStatus.OK
    assert (await store.read(sequence.seq_id, from_indexes=[0, 0])).outputs == (tuple(range(7)), (8,) * 4)


async def test_another_life_of_the_library_finds_what_is_in_the_tail(store: Any, new: New) -> None:
    """And begins anew: nothing that the worker believes holds any more."""
    sequence = new("s")
    await begin(store, sequence)
    assert await append(store, sequence, 2, [2]) is AppendStatus.OK
    await store.server.client.function_load(store.server.source, replace=True)
    assert await output(store, sequence) == [0, 1, 2]
    assert await tail_bytes(store) == 0
    assert await append(store, sequence, 3, [3]) is AppendStatus.OK
    assert await append(store, sequence, 4, [4]) is AppendStatus.OK
    assert await output(store, sequence) == list(range(5))


async def test_late_and_repeated_calls_change_nothing(store: Any, new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a late checkpoint it is known that it is late: else it would drop what has come since."""
    monkeypatch.setattr(worker_tail, "MAX_TAIL_BYTES", 300)
    calls = list[Any]()
    original = store.server.call

    async def recorded(name: str, *args: Any, **more: Any) -> Any:
        calls.append((name, args, more))
        return await original(name, *args, **more)

    monkeypatch.setattr(store, "_call", recorded)
    first, second = new("a", max_tokens=100), new("b", max_tokens=100)
    await begin(store, first)
    await begin(store, second)
    for index in range(2, 30):
        for sequence in (first, second):
            assert await append(store, sequence, index, [index]) is AppendStatus.OK
        for name, args, more in calls[-6:]:
            if name in ("append_tail", "append_batch"):
                await original(name, *args, **more)
    checkpoints = [call for call in calls if call[0] == "append_batch" and call[1][1] >= 0]
    assert len(checkpoints) > 2
    assert await tail_bytes(store) > 0
    for name, args, more in checkpoints:
        await original(name, *args, **more)
    for sequence in (first, second):
        assert await output(store, sequence) == list(range(30))


async def test_a_worker_that_forgets_what_it_has_in_its_tail_goes_on(store: Any, make_another: Any, new: New) -> None:
    sequence = new("s")
    await begin(store, sequence)
    for first in range(2, 5):
        assert await append(store, sequence, first, [first]) is AppendStatus.OK
    forgetful = make_another()
    for first in range(5, 8):
        assert await append(forgetful, sequence, first, [first]) is AppendStatus.OK
    assert await output(store, sequence) == list(range(8))


async def test_what_had_joined_in_an_earlier_life_has_to_join_again(store: Any, make_another: Any, new: New) -> None:
    """Although another sequence of the same worker has joined since."""
    sequence, other = new("s"), new("t")
    for each in (sequence, other):
        await begin(store, each)
        assert await append(store, each, 2, [2]) is AppendStatus.OK
    await store.server.client.function_load(store.server.source, replace=True)
    assert await append(make_another(), other, 3, [3]) is AppendStatus.OK
    assert await append(store, sequence, 3, [3]) is AppendStatus.OK
    assert await output(store, sequence) == [0, 1, 2, 3]


async def test_a_lost_tail_is_a_gap_that_the_worker_fills(store: Any, new: New) -> None:
    """As after the promotion of a replica that lagged behind."""
    sequence = new("s")
    await begin(store, sequence)
    for first in range(2, 5):
        assert await append(store, sequence, first, [first]) is AppendStatus.OK
    await store.server.client.delete(f"octavo:tail:{W1}")
    await store.server.client.function_load(store.server.source, replace=True)
    assert await append(store, sequence, 5, [5]) is AppendStatus.GAP
    assert await append(store, sequence, 2, [2, 3, 4, 5]) is AppendStatus.OK
    assert await append(store, sequence, 6, [6]) is AppendStatus.OK
    assert await output(store, sequence) == list(range(7))


async def test_a_suspect_keeps_out_of_the_tail_until_it_has_proved_itself(store: Any, new: New) -> None:
    """Each of its tokens counts, so each must come to its record."""
    sequence = new("s")
    await begin(store, sequence)
    assert (await store.take_ownership(TakeRequest(sequence.seq_id, 1, W2, "u", TakeReason.LEASE))).crashes == 1
    for first in range(2, 20):
        assert (await store.read(sequence.seq_id)).record.crashes == (first < 18)
        [reply] = await store.append_batch(W2, [AppendItem(sequence.seq_id, 2, 0, first, [first])])
        assert reply.status is AppendStatus.OK
        assert await store.server.client.exists(f"octavo:tail:{W2}") == (first == 19)
    assert await output(store, sequence) == list(range(20))


async def test_a_new_request_of_the_same_id_gets_nothing_of_the_old_one(store: Any, new: New) -> None:
    sequence = new("s")
    await begin(store, sequence)
    for first in range(2, 5):
        assert await append(store, sequence, first, [first]) is AppendStatus.OK
    stale = await store.server.client.get(f"octavo:tail:{W1}")
    record = keys.record(sequence.seq_id)
    await store.finish(Finish(sequence.seq_id, FinishReason.STOP))
    await store.server.client.delete(record, f"{record}:0")
    await store.server.client.set(f"octavo:tail:{W1}", stale)
    await begin(store, sequence)
    assert await output(store, sequence) == [0, 1]
    assert await append(store, sequence, 2, [9]) is AppendStatus.OK
    assert await append(store, sequence, 3, [9]) is AppendStatus.OK
    assert await output(store, sequence) == [0, 1, 9, 9]


async def test_a_record_that_an_operator_deleted_gets_no_journal_again(store: Any, new: New) -> None:
    """The worker hears of it when its tokens go to the journals."""
    sequence = new("s")
    await begin(store, sequence)
    record = keys.record(sequence.seq_id)
    await store.server.client.delete(record, f"{record}:0")
    assert await append(store, sequence, 2, [2]) is AppendStatus.OK
    [reply] = await store.append_batch(W1, [AppendItem(sequence.seq_id, 1, 0, 3, [3], FinishReason.LENGTH)])
    assert reply.status is AppendStatus.GONE
    assert await store.server.client.exists(f"{record}:0") == 0
    assert await append(store, sequence, 3, [3]) is AppendStatus.GONE


async def test_a_journal_that_an_operator_cut_is_a_gap_and_keeps_what_it_has(store: Any, new: New) -> None:
    sequence = new("s")
    await begin(store, sequence)
    journal = f"{keys.record(sequence.seq_id)}:0"
    await store.server.client.set(journal, (0).to_bytes(4, "little"), keepttl=True)
    assert await append(store, sequence, 2, [2]) is AppendStatus.OK
    assert await output(store, sequence) == [0]
    [reply] = await store.append_batch(W1, [AppendItem(sequence.seq_id, 1, 0, 3, [3], FinishReason.LENGTH)])
    assert (reply.status, reply.length) == (AppendStatus.GAP, 1)
    assert await append(store, sequence, 1, [1, 2]) is AppendStatus.OK


async def test_after_the_loss_of_all_data_nothing_is_remembered(store: Any, new: New) -> None:
    sequence = new("s")
    await begin(store, sequence)
    await store.server.client.flushall()
    await store.server.client.set("octavo:test-clock", 1_000_000_000_000)
    assert await append(store, sequence, 2, [2]) is AppendStatus.GONE
    assert await store.server.client.keys("octavo:seq:*") == []


async def test_a_large_batch_goes_in_several_calls(store: Any, new: New) -> None:
    """The first item goes into the tail, the others of the same branch to the journal."""
    sequence = new("s", max_tokens=2000)
    await begin(store, sequence)
    await store.server.client.config_resetstat()
    items = [AppendItem(sequence.seq_id, 1, 0, index, [7]) for index in range(2, 3 + 2 * MAX_BATCH)]
    replies = await store.append_batch(W1, items)
    assert {reply.status for reply in replies} == {AppendStatus.OK}
    assert [reply.length for reply in replies] == list(range(3, 4 + 2 * MAX_BATCH))
    assert (await calls_of(store))["fcall"] <= 4
    assert MAX_BATCH <= 512


async def test_a_tail_lives_as_long_as_its_worker(store: Any, new: New) -> None:
    """However long ago it began: tokens that are a minute old must not go with it."""
    sequence = new("s")
    await begin(store, sequence)
    assert await append(store, sequence, 2, [2]) is AppendStatus.OK
    names = [f"octavo:tail:{W1}", "octavo:tails"]
    for name in names:
        await store.server.client.pexpire(name, HOUR_MS)
    await store.heartbeat(Member("worker", W1, b"", "", ""), 2000)
    assert min([await store.server.client.pttl(name) for name in names]) > 23 * HOUR_MS


async def test_tokens_of_a_dead_worker_live_as_long_as_their_record(server_bench: Any, store: Any, new: New) -> None:
    """Although nobody takes it, and nobody renews the tail."""
    sequence = new("s")
    await begin(store, sequence)
    assert await append(store, sequence, 2, [2]) is AppendStatus.OK
    await server_bench.advance(13 * HOUR_MS)
    await store.heartbeat(Member("router", Incarnation("router1"), b""), 2000)  # so that nothing changes the record
    await store.sweep(100, 1000)
    await store.server.client.delete(f"octavo:tail:{W1}")
    assert await output(store, sequence) == [0, 1, 2]


async def test_the_tail_of_a_worker_that_is_gone_goes_too(server_bench: Any, store: Any, new: New) -> None:
    sequence, taken = new("s"), new("t")
    for each in (sequence, taken):
        await begin(store, each)
        assert await append(store, each, 2, [2]) is AppendStatus.OK
    await store.finish(Finish(sequence.seq_id, FinishReason.STOP))
    await store.take_ownership(TakeRequest(taken.seq_id, 1, W2, "u", TakeReason.LEASE))
    await server_bench.advance(1000)
    await store.sweep(100, 1000)
    assert await tail_bytes(store) == 0
    assert await store.server.client.exists("octavo:tails") == 0
    assert await append(store, taken, 3, [3]) is AppendStatus.FENCED  # it only slept
    assert await output(store, taken) == [0, 1, 2]


async def test_calls_that_are_repeated_without_end_do_not_fill_the_server(store: Any, new: New) -> None:
    """As while too few replicas answer: each attempt is executed, and fails."""
    sequence = new("s", max_tokens=5000)
    await begin(store, sequence)
    assert await append(store, sequence, 2, [2]) is AppendStatus.OK
    items = codec.pack_tail_items([AppendItem(sequence.seq_id, 1, 0, 3, list(range(3, 2003)))])
    for _ in range(300):
        status, *_ = await store._call("append_tail", W1, store._tails[W1]._version, items)
        assert status == b"OK"
    assert await tail_bytes(store) < 8 * MAX_TAIL_BYTES
    assert await append(store, sequence, 3, list(range(3, 2003))) is AppendStatus.OK
    assert await append(store, sequence, 2003, [2003]) is AppendStatus.OK
    assert await output(store, sequence) == list(range(2004))


async def test_a_server_whose_clock_is_behind_knows_that_it_has_forgotten(store: Any, new: New) -> None:
    """A version of the process before it is above all of its own."""
    ahead = store.server.source.replace("redis.call('TIME')", "{ '2000000000', '0' }")
    assert ahead != store.server.source
    await store.server.client.function_load(ahead, replace=True)
    sequence, other = new("s"), new("t")
    await begin(store, sequence)
    await store.server.client.function_load(store.server.source, replace=True)
    await begin(store, other)  # its first tokens go to its journal
    await store.requeue(sequence.seq_id, 1)
    assert await append(store, other, 2, [2]) is AppendStatus.OK
    assert await append(store, sequence, 2, [2]) is AppendStatus.FENCED


async def test_two_clients_of_a_worker_both_hear_what_has_changed(store: Any, make_another: Any, new: New) -> None:
    requeued, other, third = new("s"), new("t"), new("u")
    another = make_another()
    await begin(store, requeued)
    await begin(another, other)
    await begin(another, third)
    await store.requeue(requeued.seq_id, 1)
    assert await append(another, other, 2, [2]) is AppendStatus.OK
    await store.cancel(third.seq_id)
    assert await append(another, other, 3, [3]) is AppendStatus.OK
    assert await append(another, other, 4, [4]) is AppendStatus.OK
    assert await append(store, requeued, 2, [2]) is AppendStatus.FENCED
    assert await output(store, other) == list(range(5))


async def test_a_checkpoint_that_comes_late_takes_no_other_tail_for_its_own(
    store: Any, new: New, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tails of a steady load are emptied at the same number of bytes each time."""
    sequence = new("s", max_tokens=100)
    await begin(store, sequence)
    calls = list[Any]()
    original = store.server.call

    async def recorded(name: str, *args: Any, **more: Any) -> Any:
        calls.append((name, args, more))
        return await original(name, *args, **more)

    monkeypatch.setattr(store._tails[W1], "_call", recorded)
    with monkeypatch.context() as small:
        small.setattr(worker_tail, "MAX_TAIL_BYTES", 100)
        for index in range(2, 5):
            assert await append(store, sequence, index, [index]) is AppendStatus.OK
    assert await tail_bytes(store) == 0
    name, args, more = calls[-1]
    assert name == "append_batch"
    for index in range(5, 8):
        assert await append(store, sequence, index, [index]) is AppendStatus.OK
    await original(name, *args, **more)
    assert await output(store, sequence) == list(range(8))


@pytest.fixture
async def probed(server: EmbeddedStore) -> AsyncIterator[Any]:
    """A store that says what its library remembers: workers, and sequences that have left a tail."""
    opened = RedisStore(server.url, source=library.source() + PROBE)
    await opened.server.client.flushall()
    await opened.server.client.function_load(opened.server.source, replace=True)
    await opened.open()
    yield opened
    await opened.server.client.function_load(library.source(), replace=True)
    await opened.close()


PROBE = """
define('probe', function()
  local num_lanes, num_left = 0, 0
  for _, lane in pairs(lanes) do
    num_lanes = num_lanes + 1
    for _ in pairs(lane.left) do num_left = num_left + 1 end
  end
  return { 'OK', num_lanes, num_left, num_joined }
end)
"""


async def test_what_the_library_remembers_is_bounded(probed: Any, new: New) -> None:
    """Also where no sequence ever gets so far that a tail has anything in it."""
    for number in range(1500):
        sequence = new(str(number))
        await begin(probed, sequence, tokens=1)
        end = AppendItem(sequence.seq_id, 1, 0, 1, [1], FinishReason.LENGTH)
        [reply] = await probed.append_batch(W1, [end])
        assert reply.status is AppendStatus.OK
    _, num_lanes, num_left, num_joined = await probed._call("probe")
    assert (num_lanes, num_joined) == (1, 0)
    assert num_left <= 1024
    await probed.heartbeat(Member("worker", W1, b"", "", ""), 1)
    while (await probed._call("probe"))[1]:
        await asyncio.sleep(0.01)
        await probed.sweep(100, 1000)
    assert await probed._call("probe") == [b"OK", 0, 0, 0]


async def test_what_a_worker_remembers_is_bounded(store: Any, new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it drops each sequence after its first tokens, and appends no others."""
    monkeypatch.setattr(worker_tail, "MAX_UNHEARD", 10, raising=False)
    for number in range(50):
        sequence = new(str(number))
        await begin(store, sequence)
        await store.cancel(sequence.seq_id)
    assert len(store._tails[W1]._joined) < 20
