"""What every store promises, one promise per test, on memory and on real servers with one shard and several."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from octavo.errors import PoisonSuspected
from octavo.ids import Incarnation, RequestId, sequence_id
from octavo.record import (
    AcceptStatus,
    Append,
    AppendStatus,
    Member,
    MigrateStatus,
    NewSequence,
    Notice,
    QueueLimits,
    State,
    TakeStatus,
    Why,
)
from octavo.sampling import FinishReason

ROUTER, OTHER = Incarnation("router1"), Incarnation("router2")
W1, W2, W3, W4 = (Incarnation(f"worker{i}") for i in range(1, 5))
LIMITS = QueueLimits()
New = Callable[..., NewSequence]


async def running(store: Any, request: NewSequence, owner: Incarnation = W1) -> int:
    """Accepts and places a request; the epoch."""
    await store.accept(request, LIMITS)
    taken = await store.take(request.seq_id, 0, owner, "first", Why.QUEUED)
    assert taken.status is TakeStatus.OK
    return int(taken.epoch)


async def test_a_request_survives_the_trip_unchanged(bench: Any, new: New) -> None:
    request = new(num_branches=2, deadline_in_ms=5000, keep_on_disconnect=True, tenant="tenänt {s1}", salt="")
    assert (await bench.store.accept(request, LIMITS)).status is AcceptStatus.OK
    snapshot = await bench.store.read(request.seq_id, prompt=True, from_indexes=[0, 0])
    record = snapshot.record
    for name in ("request_id", "body_hash", "tenant", "salt", "model", "layout", "sampling", "prompt_chain",
                 "num_branches", "max_tokens", "priority", "keep_on_disconnect", "router"):  # fmt: skip
        assert getattr(record, name) == getattr(request, name), name
    assert snapshot.prompt == request.prompt
    assert snapshot.outputs == ((), ())
    assert record.deadline_ms == record.accepted_ms + 5000 == snapshot.now_ms + 5000
    assert (record.state, record.epoch, record.prompt_len) == (State.QUEUED, 0, len(request.prompt))


async def test_a_retry_is_recognized_and_another_body_refused(bench: Any, new: New) -> None:
    assert (await bench.store.accept(new(), LIMITS)).status is AcceptStatus.OK
    assert (await bench.store.accept(new(), LIMITS)).status is AcceptStatus.EXISTS
    assert (await bench.store.accept(new(body_hash=b"other"), LIMITS)).status is AcceptStatus.MISMATCH
    assert await bench.store.queue_depth() == (1, 67)


async def test_the_queue_is_bounded_in_requests_and_tokens(make_memory_bench: Any, new: New) -> None:
    store = make_memory_bench().store
    for i in range(3):
        assert (await store.accept(new(str(i)), QueueLimits(3, 10_000))).status is AcceptStatus.OK
    full = await store.accept(new("3"), QueueLimits(3, 10_000))
    assert (full.status, full.num_queued, full.queued_tokens) == (AcceptStatus.FULL, 3, 201)
    assert (await store.accept(new("3"), QueueLimits(4, 250))).status is AcceptStatus.FULL


async def test_classes_then_arrival_and_requeued_ones_first(bench: Any, new: New) -> None:
    names = {"a": 3, "b": 3, "c": 2}
    ids = {}
    for name, priority in names.items():
        seq_id = sequence_id("tenant", RequestId(name))[4:]
        ids[name] = "0000" + seq_id  # one shard: between shards the order is not promised
        await bench.store.accept(new(name, seq_id=ids[name], priority=priority), LIMITS)
    first = await bench.store.pop(ROUTER, 2, 100)
    assert [popped.seq_id for popped in first] == [ids["c"], ids["a"]]
    epoch = (await bench.store.take(ids["a"], 0, W1, "t", Why.QUEUED)).epoch
    assert await bench.store.requeue(ids["a"], epoch)
    assert await bench.store.requeue(ids["c"], 0)
    again = await bench.store.pop(ROUTER, 9, 100)
    assert [popped.seq_id for popped in again] == [ids["c"], ids["a"], ids["b"]]
    assert again[1].epoch == epoch + 1  # whoever owned it is fenced


async def test_a_requeue_can_be_repeated(bench: Any, new: New) -> None:
    epoch = await running(bench.store, new())
    for _ in range(2):
        assert await bench.store.requeue(new().seq_id, epoch)
    assert (await bench.store.queue_depth())[0] == 1
    assert not await bench.store.requeue(new().seq_id, epoch - 1)


async def test_the_timeline_keeps_the_last_entries(bench: Any, new: New) -> None:
    epoch = await running(bench.store, new())
    for i in range(40):
        await bench.advance(1)
        epoch = (await bench.store.take(new().seq_id, epoch, W1, str(i), Why.REFUSED)).epoch
    timeline = (await bench.store.read(new().seq_id)).record.timeline
    assert timeline == tuple((ms, "taken", f"{W1} refused") for ms in range(9, 41))


async def test_a_claim_that_is_not_used_returns_to_the_queue(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    assert len(await bench.store.pop(ROUTER, 1, 100)) == 1
    assert await bench.store.pop(OTHER, 1, 100) == []
    await bench.advance(101)
    assert (await bench.store.sweep(10, 1000)).requeued == [new().seq_id]
    assert len(await bench.store.pop(OTHER, 1, 100)) == 1


async def test_nothing_is_popped_past_its_deadline(bench: Any, new: New) -> None:
    await bench.store.accept(new(deadline_in_ms=50), LIMITS)
    await bench.advance(50)
    assert await bench.store.pop(ROUTER, 1, 100) == []
    record = (await bench.store.read(new().seq_id)).record
    assert (record.state, record.finishes) == (State.DONE, (FinishReason.DEADLINE,))
    assert await bench.store.queue_depth() == (0, 0)


async def test_sweep_ends_what_waits_past_its_deadline(bench: Any, new: New) -> None:
    await bench.store.accept(new(deadline_in_ms=50), LIMITS)
    await bench.advance(2000)
    assert (await bench.store.sweep(10, 1000)).expired == [new().seq_id]
    assert (await bench.store.sweep(10, 1000)).expired == []


async def test_of_many_takers_one_wins(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    seq_id = new().seq_id
    takes = [bench.store.take(seq_id, 0, Incarnation(f"w{i}"), f"t{i}", Why.QUEUED) for i in range(8)]
    answers = await asyncio.gather(*takes)
    assert sorted(answer.status for answer in answers) == [TakeStatus.FENCED] * 7 + [TakeStatus.OK]
    winner = [answer.status for answer in answers].index(TakeStatus.OK)
    assert (await bench.store.take(seq_id, 0, Incarnation("x"), f"t{winner}", Why.QUEUED)).status is TakeStatus.SAME


async def test_appends_are_checked_for_epoch_index_and_content(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await running(bench.store, new())

    async def append(first: int, tokens: list[int], at: int = epoch, **more: Any) -> tuple[AppendStatus, int]:
        [reply] = await bench.store.append_batch([Append(seq_id, at, 0, first, tokens, **more)])
        return reply.status, reply.length

    assert await append(0, [7, 2**32 - 1]) == (AppendStatus.OK, 2)
    assert await append(0, [7, 2**32 - 1]) == (AppendStatus.DUP, 2)
    assert await append(1, [5]) == (AppendStatus.CONFLICT, 2)
    assert await append(3, [5]) == (AppendStatus.GAP, 2)
    assert await append(2, [5], epoch + 1) == (AppendStatus.FENCED, 2)
    assert await append(2, [5], epoch - 1) == (AppendStatus.FENCED, 2)
    assert await append(1, [2**32 - 1, 9]) == (AppendStatus.OK, 3)  # what is new of an overlapping chunk
    assert await append(3, [1] * 62) == (AppendStatus.CONFLICT, 3)  # beyond max_tokens
    assert await append(1, [], finish=FinishReason.STOP) == (AppendStatus.CONFLICT, 3)  # an end before the end
    await bench.store.cancel(seq_id)
    assert await append(3, [4]) == (AppendStatus.OK_CANCEL, 4)
    assert await append(4, [6], finish=FinishReason.STOP) == (AppendStatus.OK_CANCEL, 5)
    assert await append(4, [6], finish=FinishReason.STOP) == (AppendStatus.DUP, 5)
    assert await append(5, [6]) == (AppendStatus.CLOSED, 5)
    snapshot = await bench.store.read(seq_id, from_indexes=[3])
    assert snapshot.outputs == ((4, 6),)
    assert snapshot.record.state is State.DONE


async def test_a_batch_answers_item_by_item(bench: Any, new: New) -> None:
    epochs = {name: await running(bench.store, new(name, num_branches=2)) for name in "abcdefgh"}
    ids = {name: new(name).seq_id for name in epochs}
    items = [Append(ids[name], epochs[name], branch, 0, [branch, 3]) for name in ids for branch in (0, 1)]
    items[3] = Append(ids["b"], 9, 1, 0, [1])
    items.append(Append(new("unknown").seq_id, 1, 0, 0, [1]))
    expected = [AppendStatus.OK] * 17
    expected[3], expected[16] = AppendStatus.FENCED, AppendStatus.GONE
    assert [reply.status for reply in await bench.store.append_batch(items)] == expected
    assert await bench.store.append_batch([]) == []
    assert (await bench.store.read(ids["h"], from_indexes=[0, 1])).outputs == ((0, 3), (3,))


async def test_a_stop_string_stands_where_it_is_however_far_the_worker_went(bench: Any, new: New) -> None:
    request = new(num_branches=2)
    epoch = await running(bench.store, request)
    for branch in (0, 1):
        item = Append(request.seq_id, epoch, branch, 0, [1, 2, 3], FinishReason.LENGTH, score=-3.0)
        await bench.store.append_batch([item])
    assert await bench.store.finish(request.seq_id, 0, FinishReason.STOP, 2, score=-2.5)
    assert await bench.store.finish(request.seq_id, 0, FinishReason.STOP, 2, score=-2.5)
    assert await bench.store.finish(request.seq_id, 1, FinishReason.LENGTH, 3)
    record = (await bench.store.read(request.seq_id)).record
    assert (record.state, record.finishes) == (State.DONE, (FinishReason.STOP, FinishReason.LENGTH))
    assert (record.final_lengths, record.scores) == ((2, 3), (-2.5, -3.0))


async def test_a_sequence_ends_with_its_last_branch(bench: Any, new: New) -> None:
    request = new(num_branches=3)
    epoch = await running(bench.store, request)
    await bench.store.append_batch([Append(request.seq_id, epoch, 0, 0, [1, 2], FinishReason.LENGTH)])
    await bench.store.append_batch([Append(request.seq_id, epoch, 1, 0, [1, 2, 3])])
    assert await bench.store.finish(request.seq_id, 1, FinishReason.STOP, 2)
    assert not await bench.store.finish(request.seq_id, 2, FinishReason.STOP, 1)  # more than there is
    assert (await bench.store.read(request.seq_id)).record.state is State.RUNNING
    assert await bench.store.finish(request.seq_id, -1, FinishReason.ERROR, None, '{"reason": "X"}')
    record = (await bench.store.read(request.seq_id)).record
    assert record.finishes == (FinishReason.LENGTH, FinishReason.STOP, FinishReason.ERROR)
    assert (record.num_tokens, record.final_lengths) == ((2, 3, 0), (2, 2, 0))
    assert (record.state, record.failure) == (State.FAILED, '{"reason": "X"}')
    assert await bench.store.finish(request.seq_id, 0, FinishReason.LENGTH, None)
    assert not await bench.store.finish(request.seq_id, 0, FinishReason.STOP, None)


async def test_a_lease_protects_its_owner(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await running(bench.store, new())
    await bench.store.heartbeat(Member("worker", W1, b"info"), 1000)
    assert (await bench.store.take(seq_id, epoch, W2, "t", Why.LEASE)).status is TakeStatus.ALIVE
    await bench.advance(1000)
    taken = await bench.store.take(seq_id, epoch, W2, "t", Why.LEASE)
    assert (taken.status, taken.epoch, taken.crashes) == (TakeStatus.OK, epoch + 1, 1)
    [stale] = await bench.store.append_batch([Append(seq_id, epoch, 0, 0, [1])])
    assert stale.status is AppendStatus.FENCED


async def test_refusals_count_no_crash(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await running(bench.store, new())
    taken = await bench.store.take(seq_id, epoch, W2, "t", Why.REFUSED)
    assert (taken.status, taken.crashes) == (TakeStatus.OK, 0)
    assert (await bench.store.take(seq_id, epoch, W3, "u", Why.REFUSED)).status is TakeStatus.FENCED


async def crash(bench: Any, seq_id: str, epoch: int, to: Incarnation) -> Any:
    return await bench.store.take(seq_id, epoch, to, f"crash{epoch}", Why.CONNECTION)


async def test_two_suspects_never_share_a_worker(bench: Any, new: New) -> None:
    """Else nobody could tell which of them kills it."""
    first, second = new("first").seq_id, new("second").seq_id
    epoch = await running(bench.store, new("first"))
    await running(bench.store, new("second"))
    for seq_id in (first, second):
        assert (await crash(bench, seq_id, epoch, W2)).crashes == 1
    assert (await crash(bench, first, epoch + 1, W3)).crashes == 2
    refused = await crash(bench, second, epoch + 1, W3)
    assert refused.status is TakeStatus.FROZEN
    assert (refused.epoch, refused.crashes, refused.retry_ms > 0) == (epoch + 1, 1, True)
    assert (await crash(bench, second, epoch + 1, W4)).status is TakeStatus.OK  # elsewhere, or when the first has ended
    await bench.store.finish(first, -1, FinishReason.CANCELLED, None)
    assert (await crash(bench, second, epoch + 2, W3)).status is TakeStatus.POISON


async def test_the_third_crash_is_poison(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await running(bench.store, new())
    assert (await crash(bench, seq_id, epoch, W2)).crashes == 1
    assert (await crash(bench, seq_id, epoch + 1, W3)).crashes == 2
    for _ in range(2):  # and a retry is told the same
        assert (await crash(bench, seq_id, epoch + 2, W4)).status is TakeStatus.POISON
    record = (await bench.store.read(seq_id)).record
    assert (record.state, record.suspects) == (State.FAILED, (W1, W2, W3))
    assert json.loads(record.failure)["reason"] == PoisonSuspected.reason


async def test_tokens_prove_a_sequence_harmless(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await running(bench.store, new())
    for crashes, owner in ((1, W2), (2, W3)):
        assert (await crash(bench, seq_id, epoch + crashes - 1, owner)).crashes == crashes
    await bench.store.append_batch([Append(seq_id, epoch + 2, 0, 0, [1] * 15)])
    assert (await bench.store.read(seq_id)).record.crashes == 2
    await bench.store.append_batch([Append(seq_id, epoch + 2, 0, 15, [1])])
    assert (await bench.store.read(seq_id)).record.crashes == 0
    assert (await crash(bench, seq_id, epoch + 2, W4)).crashes == 1


async def test_an_innocent_sequence_is_not_blamed_for_a_suspect(bench: Any, new: New) -> None:
    suspect, epoch = new("suspect").seq_id, await running(bench.store, new("suspect"))
    await crash(bench, suspect, epoch, W2)
    await crash(bench, suspect, epoch + 1, W3)  # the second crash: W3 runs it alone from here
    innocents = [f"innocent{i}" for i in range(8)]  # in several shards
    for name in innocents:
        await running(bench.store, new(name), W3)
        taken = await bench.store.take(new(name).seq_id, 1, W4, "t", Why.CONNECTION)
        assert (taken.status, taken.crashes) == (TakeStatus.OK, 0)
    await running(bench.store, new("later"), W3)
    await bench.advance(60_000)  # nobody runs alone for ever
    assert (await bench.store.take(new("later").seq_id, 1, W4, "t", Why.CONNECTION)).crashes == 1
    assert (await crash(bench, suspect, epoch + 2, W4)).status is TakeStatus.POISON


async def test_take_overs_freeze_after_a_restart(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await running(bench.store, new())
    before = bench.store.generation
    await bench.restart()
    frozen = await bench.store.take(seq_id, epoch, W2, "t", Why.CONNECTION)
    assert (frozen.status, frozen.retry_ms) == (TakeStatus.FROZEN, 3000)
    assert bench.store.generation > before
    await bench.advance(2000)
    assert (await bench.store.sweep(10, 10_000)).orphans == []
    assert (await bench.store.take(seq_id, epoch, W2, "t", Why.LEASE)).status is TakeStatus.FROZEN
    await bench.advance(1000)
    assert (await bench.store.take(seq_id, epoch, W2, "t", Why.LEASE)).status is TakeStatus.OK


async def test_placing_goes_on_after_a_restart(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    await bench.restart()
    assert len(await bench.store.pop(ROUTER, 1, 100)) == 1
    assert (await bench.store.take(new().seq_id, 0, W1, "t", Why.QUEUED)).status is TakeStatus.OK


async def test_orphans_are_reported_again_until_somebody_takes_them(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await running(bench.store, new())
    await bench.store.heartbeat(Member("worker", W1, b""), 1000)
    await bench.store.heartbeat(Member("router", ROUTER, b""), 100_000)
    await bench.advance(999)
    assert (await bench.store.sweep(10, 1000)).orphans == []
    for _ in range(2):
        await bench.advance(1001)
        assert (await bench.store.sweep(10, 1000)).orphans == [(seq_id, epoch)]
        assert (await bench.store.sweep(10, 1000)).orphans == []  # not twice in a moment


async def test_the_detached_are_cancelled_after_their_grace(bench: Any, new: New) -> None:
    for name, keep in (("leaves", False), ("keeps", True)):
        await running(bench.store, new(name, keep_on_disconnect=keep))
        await bench.store.detach(new(name).seq_id, OTHER)  # not attached: no effect
        assert (await bench.store.read(new(name).seq_id)).record.router == ROUTER
        await bench.store.detach(new(name).seq_id, ROUTER)
    await bench.advance(1999)
    assert (await bench.store.sweep(10, 2000)).cancelled == []
    await bench.advance(1)
    assert (await bench.store.sweep(10, 2000)).cancelled == [new("leaves").seq_id]
    record = (await bench.store.read(new("leaves").seq_id)).record
    assert (record.state, record.cancel) == (State.RUNNING, True)


async def test_a_dead_router_detaches_and_a_living_one_does_not(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    await bench.store.heartbeat(Member("router", ROUTER, b""), 3000)
    for _ in range(5):
        await bench.advance(1000)
        await bench.store.heartbeat(Member("router", ROUTER, b""), 3000)
        assert (await bench.store.sweep(10, 1500)).cancelled == []
    await bench.advance(3000)
    await bench.store.sweep(10, 1500)  # sees it
    await bench.advance(1500)
    assert (await bench.store.sweep(10, 1500)).cancelled == [new().seq_id]
    assert (await bench.store.read(new().seq_id)).record.state is State.CANCELLED


async def test_a_router_that_comes_back_keeps_its_client(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    await bench.advance(1000)
    await bench.store.sweep(10, 5000)
    assert (await bench.store.read(new().seq_id)).record.detached_since_ms > 0
    await bench.store.heartbeat(Member("router", ROUTER, b""), 100_000)
    await bench.advance(6000)
    assert (await bench.store.sweep(10, 5000)).cancelled == []
    record = (await bench.store.read(new().seq_id)).record
    assert (record.router, record.detached_since_ms) == (ROUTER, 0)


async def test_attach_brings_a_client_back(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    await bench.store.detach(new().seq_id, ROUTER)
    record = await bench.store.attach(new().seq_id, OTHER)
    assert (record.router, record.detached_since_ms) == (OTHER, 0)
    assert await bench.store.attach(new("unknown").seq_id, OTHER) is None


async def test_cancel_is_at_once_while_waiting_and_repeatable(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    for _ in range(2):
        assert (await bench.store.cancel(new().seq_id)).state is State.CANCELLED
    assert await bench.store.queue_depth() == (0, 0)
    assert await bench.store.pop(ROUTER, 1, 100) == []
    assert await bench.store.cancel(new("unknown").seq_id) is None


async def test_the_cancelled_are_not_run_again(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await running(bench.store, new())
    await bench.store.cancel(seq_id)
    assert (await crash(bench, seq_id, epoch, W2)).status is TakeStatus.CLOSED
    assert (await bench.store.read(seq_id)).record.state is State.CANCELLED


async def test_commit_and_abort_exclude_each_other(bench: Any, new: New) -> None:
    seq_id, epoch, store = new().seq_id, await running(bench.store, new()), bench.store
    await store.append_batch([Append(seq_id, epoch, 0, 0, [1, 2])])
    assert (await store.mig_begin(seq_id, epoch, "m1", W2)).status is MigrateStatus.OK
    assert (await store.mig_begin(seq_id, epoch, "m2", W3)).status is MigrateStatus.BUSY
    assert (await store.mig_commit(seq_id, epoch, "m1", W2, [1])).status is MigrateStatus.GAP
    assert (await store.mig_abort(seq_id, epoch, "m1")).status is MigrateStatus.ABORTED
    assert (await store.mig_commit(seq_id, epoch, "m1", W2, [2])).status is MigrateStatus.NO_MIGRATION
    assert (await store.mig_begin(seq_id, epoch, "m2", W3)).status is MigrateStatus.OK
    for status in (MigrateStatus.OK, MigrateStatus.SAME):
        committed = await store.mig_commit(seq_id, epoch, "m2", W3, [2])
        assert (committed.status, committed.epoch) == (status, epoch + 1)
    assert (await store.mig_abort(seq_id, epoch, "m2")).status is MigrateStatus.COMMITTED
    [stale] = await store.append_batch([Append(seq_id, epoch, 0, 2, [3])])
    assert stale.status is AppendStatus.FENCED  # I8
    [fresh] = await store.append_batch([Append(seq_id, epoch + 1, 0, 2, [3])])
    assert fresh.status is AppendStatus.OK


async def test_members_come_and_go(bench: Any) -> None:
    first, second = Member("worker", W1, b"\xff1"), Member("worker", W2, b"2")
    await bench.store.heartbeat(first, 1000)
    await bench.store.heartbeat(second, 3000)
    await bench.store.heartbeat(Member("router", ROUTER, b"r"), 3000)
    assert await bench.store.members("worker") == [first, second]
    await bench.advance(1000)
    assert await bench.store.members("worker") == [second]
    await bench.store.leave(second)
    assert await bench.store.members("worker") == []
    assert await bench.store.members("router") == [Member("router", ROUTER, b"r")]


async def test_listing_finds_the_live_by_owner(bench: Any, new: New) -> None:
    names = [str(i) for i in range(12)]
    for name in names:
        await running(bench.store, new(name), W1 if int(name) % 2 else W2)
    await bench.store.finish(new("0").seq_id, -1, FinishReason.STOP, None)
    every = await bench.store.list_sequences(None, 100)
    assert {record.request_id for record in every} == set(names[1:])
    assert {record.owner for record in await bench.store.list_sequences(W1, 100)} == {W1}
    assert len(await bench.store.list_sequences(None, 5)) == 5


async def test_a_secret_is_shared_and_stays(bench: Any) -> None:
    other = bench.another()
    await other.open()
    ours, theirs, more = await bench.store.secret("x"), await other.secret("x"), await bench.store.secret("y")
    assert ours == theirs != more
    assert len(ours) == 32


async def test_notices_reach_the_attached_router(bench: Any, new: New) -> None:
    stream = bench.store.notices(ROUTER)
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.1)
    request = new()
    epoch = await running(bench.store, request)
    await bench.store.attach(request.seq_id, ROUTER)
    await running(bench.store, new("elsewhere", router=OTHER))  # of this one, the wake-up alone
    await bench.store.cancel(request.seq_id)
    await bench.store.finish(request.seq_id, -1, FinishReason.CANCELLED, None)
    async with asyncio.timeout(5):
        notices = [await waiting] + [await anext(stream) for _ in range(4)]
    await stream.aclose()
    assert notices == [
        Notice(request.seq_id, "queued", 0, Incarnation("")),
        Notice(request.seq_id, "taken", epoch, W1),
        Notice(new("elsewhere").seq_id, "queued", 0, Incarnation("")),
        Notice(request.seq_id, "cancelled", epoch, W1),
        Notice(request.seq_id, "ended", epoch, W1),
    ]


async def test_another_process_learns_the_generation(bench: Any, new: New) -> None:
    other = bench.another()
    await other.open()
    heard: list[int] = []
    other._on_generation = heard.append
    await bench.restart()
    await bench.store.accept(new(), LIMITS)
    assert (await other.read(new().seq_id)).record.state is State.QUEUED
    await asyncio.gather(*(other.queue_depth() for _ in range(4)))
    assert heard
    assert heard[-1] == other.generation
    assert heard == sorted(set(heard))
