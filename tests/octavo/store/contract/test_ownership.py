"""Who may run a sequence: takes, leases, crashes, restarts of the server, migrations."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from octavo.errors import PoisonSuspected
from octavo.ids import Incarnation
from octavo.record import NewSequence, SequenceState
from octavo.sampling import FinishReason
from octavo.store.calls import (
    AppendItem,
    AppendStatus,
    Finish,
    Member,
    MigrateStatus,
    QueueLimits,
    TakeReason,
    TakeStatus,
)

ROUTER = Incarnation("router1")
W1, W2, W3, W4 = (Incarnation(f"worker{i}") for i in (1, 2, 3, 4))
LIMITS = QueueLimits()
New = Callable[..., NewSequence]


async def test_of_many_takers_one_wins(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    seq_id = new().seq_id
    takes = [bench.take_ownership(seq_id, 0, Incarnation(f"w{i}"), f"t{i}", TakeReason.QUEUED) for i in range(8)]
    answers = await asyncio.gather(*takes)
    assert sorted(answer.status for answer in answers) == [TakeStatus.FENCED] * 7 + [TakeStatus.OK]
    winner = [answer.status for answer in answers].index(TakeStatus.OK)
    assert (
        await bench.take_ownership(seq_id, 0, Incarnation("x"), f"t{winner}", TakeReason.QUEUED)
    ).status is TakeStatus.SAME


async def test_a_lease_protects_its_owner(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.store.heartbeat(Member("worker", W1, b"info"), 1000)
    assert (await bench.take_ownership(seq_id, epoch, W2, "t", TakeReason.LEASE)).status is TakeStatus.ALIVE
    await bench.advance(1000)
    taken = await bench.take_ownership(seq_id, epoch, W2, "t", TakeReason.LEASE)
    assert (taken.status, taken.epoch, taken.crashes) == (TakeStatus.OK, epoch + 1, 1)
    [stale] = await bench.store.append_batch([AppendItem(seq_id, epoch, 0, 0, [1])])
    assert stale.status is AppendStatus.FENCED


async def test_refusals_count_no_crash(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    taken = await bench.take_ownership(seq_id, epoch, W2, "t", TakeReason.REFUSED)
    assert (taken.status, taken.crashes) == (TakeStatus.OK, 0)
    assert (await bench.take_ownership(seq_id, epoch, W3, "u", TakeReason.REFUSED)).status is TakeStatus.FENCED


async def test_two_suspects_never_share_a_worker(bench: Any, new: New) -> None:
    """Else nobody could tell which of them kills it."""
    first, second = new("first").seq_id, new("second").seq_id
    epoch = await bench.run(new("first"))
    await bench.run(new("second"))
    for seq_id in (first, second):
        assert (await bench.crash(seq_id, epoch, W2)).crashes == 1
    assert (await bench.crash(first, epoch + 1, W3)).crashes == 2
    refused = await bench.crash(second, epoch + 1, W3)
    assert refused.status is TakeStatus.FROZEN
    assert (refused.epoch, refused.crashes, refused.retry_ms > 0) == (epoch + 1, 1, True)
    assert (await bench.crash(second, epoch + 1, W4)).status is TakeStatus.OK  # elsewhere, or when the first has ended
    await bench.store.finish(Finish(first, FinishReason.CANCELLED))
    assert (await bench.crash(second, epoch + 2, W3)).status is TakeStatus.POISON


async def test_the_third_crash_is_poison(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    assert (await bench.crash(seq_id, epoch, W2)).crashes == 1
    assert (await bench.crash(seq_id, epoch + 1, W3)).crashes == 2
    for _ in range(2):  # and a retry is told the same
        assert (await bench.crash(seq_id, epoch + 2, W4)).status is TakeStatus.POISON
    record = (await bench.store.read(seq_id)).record
    assert (record.state, record.suspects) == (SequenceState.FAILED, (W1, W2, W3))
    assert json.loads(record.failure)["reason"] == PoisonSuspected.reason


async def test_an_innocent_sequence_is_not_blamed_for_a_suspect(bench: Any, new: New) -> None:
    suspect, epoch = new("suspect").seq_id, await bench.run(new("suspect"))
    await bench.crash(suspect, epoch, W2)
    await bench.crash(suspect, epoch + 1, W3)  # the second crash: W3 runs it alone from here
    for name in ("innocent", "another"):
        await bench.run(new(name), W3)
        taken = await bench.take_ownership(new(name).seq_id, 1, W4, "t", TakeReason.CONNECTION)
        assert (taken.status, taken.crashes) == (TakeStatus.OK, 0)
    await bench.run(new("later"), W3)
    await bench.advance(60_000)  # nobody runs alone for ever
    assert (await bench.take_ownership(new("later").seq_id, 1, W4, "t", TakeReason.CONNECTION)).crashes == 1
    assert (await bench.crash(suspect, epoch + 2, W4)).status is TakeStatus.POISON


async def test_take_overs_freeze_after_a_restart(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    before = bench.store.generation
    await bench.restart()
    frozen = await bench.take_ownership(seq_id, epoch, W2, "t", TakeReason.CONNECTION)
    assert (frozen.status, frozen.retry_ms) == (TakeStatus.FROZEN, 3000)
    assert bench.store.generation > before
    await bench.advance(2000)
    assert (await bench.store.sweep(10, 10_000)).orphans == []
    assert (await bench.take_ownership(seq_id, epoch, W2, "t", TakeReason.LEASE)).status is TakeStatus.FROZEN
    await bench.advance(1000)
    assert (await bench.take_ownership(seq_id, epoch, W2, "t", TakeReason.LEASE)).status is TakeStatus.OK


async def test_placing_goes_on_after_a_restart(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    await bench.restart()
    assert len(await bench.store.pop("model", 1, 100)) == 1
    assert (await bench.take_ownership(new().seq_id, 0, W1, "t", TakeReason.QUEUED)).status is TakeStatus.OK


async def test_the_cancelled_are_not_run_again(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.store.cancel(seq_id)
    assert (await bench.crash(seq_id, epoch, W2)).status is TakeStatus.CLOSED
    assert (await bench.store.read(seq_id)).record.state is SequenceState.CANCELLED


async def test_commit_and_abort_exclude_each_other(bench: Any, new: New) -> None:
    seq_id, epoch, store = new().seq_id, await bench.run(new()), bench.store
    await store.append_batch([AppendItem(seq_id, epoch, 0, 0, [1, 2])])
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
    [stale] = await store.append_batch([AppendItem(seq_id, epoch, 0, 2, [3])])
    assert stale.status is AppendStatus.FENCED  # I8
    [fresh] = await store.append_batch([AppendItem(seq_id, epoch + 1, 0, 2, [3])])
    assert fresh.status is AppendStatus.OK
