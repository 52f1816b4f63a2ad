"""A sequence that moves while it runs: of begin, commit and abort of one number, in any order, one thing comes."""

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest

from octavo.request.ids import Incarnation
from octavo.request.record import NewSequence, SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import AppendItem, AppendStatus, Finish, MigrateStatus, TakeReason

W1, W2, W3 = (Incarnation(f"worker{i}") for i in (1, 2, 3))
New = Callable[..., NewSequence]


async def test_the_target_is_the_owner_from_the_commit_on(bench: Any, new: New) -> None:
    seq_id, epoch, store = new().seq_id, await bench.run(new()), bench.store
    await store.append_batch(W1, [AppendItem(seq_id, epoch, 0, 0, [1, 2])])
    for status in (MigrateStatus.OK, MigrateStatus.SAME):
        assert (await store.mig_begin(seq_id, epoch, 1, W2)).status is status
    assert (await store.mig_commit(seq_id, epoch, 1, W2, [1])).status is MigrateStatus.GAP
    assert (await store.mig_commit(seq_id, epoch, 1, W3, [2])).status is MigrateStatus.NO_MIGRATION
    for status in (MigrateStatus.OK, MigrateStatus.SAME):
        committed = await store.mig_commit(seq_id, epoch, 1, W2, [2])
        assert (committed.status, committed.epoch) == (status, epoch + 1)
    assert (await store.mig_commit(seq_id, epoch, 1, W3, [2])).status is MigrateStatus.FENCED
    assert (await store.mig_abort(seq_id, epoch, 1)).status is MigrateStatus.COMMITTED
    [stale] = await store.append_batch(W1, [AppendItem(seq_id, epoch, 0, 2, [3])])
    assert stale.status is AppendStatus.FENCED  # I8
    [fresh] = await store.append_batch(W2, [AppendItem(seq_id, epoch + 1, 0, 2, [3])])
    assert fresh.status is AppendStatus.OK


async def test_a_late_begin_revives_no_aborted_migration(bench: Any, new: New) -> None:
    seq_id, epoch, store = new().seq_id, await bench.run(new()), bench.store
    assert (await store.mig_begin(seq_id, epoch, 1, W2)).status is MigrateStatus.OK
    assert (await store.mig_abort(seq_id, epoch, 1)).status is MigrateStatus.ABORTED
    assert (await store.mig_begin(seq_id, epoch, 1, W2)).status is MigrateStatus.OUTDATED
    assert (await store.mig_commit(seq_id, epoch, 1, W2, [0])).status is MigrateStatus.NO_MIGRATION
    assert (await store.mig_abort(seq_id, epoch, 2)).status is MigrateStatus.ABORTED  # its begin is still on its way
    assert (await store.mig_begin(seq_id, epoch, 2, W2)).status is MigrateStatus.OUTDATED
    assert (await store.mig_begin(seq_id, epoch, 3, W2)).status is MigrateStatus.OK
    record = (await store.read(seq_id)).record
    assert (record.mig_number, record.mig_to, record.last_mig) == (3, W2, 0)


async def test_a_migration_replaces_an_older_one(bench: Any, new: New) -> None:
    seq_id, epoch, store = new().seq_id, await bench.run(new()), bench.store
    await store.mig_begin(seq_id, epoch, 1, W2)
    assert (await store.mig_begin(seq_id, epoch, 1, W3)).status is MigrateStatus.OUTDATED
    assert (await store.mig_begin(seq_id, epoch, 2, W3)).status is MigrateStatus.OK
    assert (await store.mig_commit(seq_id, epoch, 1, W2, [0])).status is MigrateStatus.NO_MIGRATION
    assert (await store.mig_abort(seq_id, epoch, 1)).status is MigrateStatus.ABORTED  # and the newer one goes on
    assert (await store.mig_commit(seq_id, epoch, 2, W3, [0])).status is MigrateStatus.OK


@pytest.mark.parametrize("order", sorted({*permutations(("begin", "commit", "abort", "begin", "commit"))}))
async def test_commit_and_abort_of_one_number_exclude_each_other(bench: Any, new: New, order: tuple[str, ...]) -> None:
    """Whatever order they arrive in, and twice."""
    seq_id, epoch, store = new().seq_id, await bench.run(new()), bench.store
    answers = {"begin": [], "commit": [], "abort": []}
    for what in order:
        if what == "begin":
            reply = await store.mig_begin(seq_id, epoch, 1, W2)
        elif what == "commit":
            reply = await store.mig_commit(seq_id, epoch, 1, W2, [0])
        else:
            reply = await store.mig_abort(seq_id, epoch, 1)
        answers[what].append(reply.status)
    moved = MigrateStatus.OK in answers["commit"]
    assert answers["abort"] == [MigrateStatus.COMMITTED if moved else MigrateStatus.ABORTED]
    record = (await store.read(seq_id)).record
    assert (record.owner, record.epoch) == ((W2, epoch + 1) if moved else (W1, epoch))


async def test_numbers_begin_anew_with_each_epoch(bench: Any, new: New) -> None:
    seq_id, epoch, store = new().seq_id, await bench.run(new()), bench.store
    await store.mig_begin(seq_id, epoch, 1, W2)
    await store.mig_commit(seq_id, epoch, 1, W2, [0])
    await bench.crash(seq_id, epoch + 1, W3)
    assert (await store.mig_commit(seq_id, epoch + 1, 1, W2, [0])).status is MigrateStatus.FENCED
    assert (await store.mig_abort(seq_id, epoch + 1, 1)).status is MigrateStatus.FENCED
    assert (await store.mig_begin(seq_id, epoch + 2, 1, W1)).status is MigrateStatus.OK


async def test_what_does_not_run_is_not_moved(bench: Any, new: New) -> None:
    seq_id, epoch, store = new().seq_id, await bench.run(new()), bench.store
    await store.mig_begin(seq_id, epoch, 1, W2)
    await store.requeue(seq_id, epoch)
    assert (await store.mig_commit(seq_id, epoch, 1, W2, [0])).status is MigrateStatus.FENCED
    taken = await bench.take_ownership(seq_id, epoch + 1, W1, "t", TakeReason.QUEUED)
    await store.mig_begin(seq_id, taken.epoch, 1, W2)
    await store.finish(Finish(seq_id, FinishReason.STOP))
    assert (await store.mig_commit(seq_id, taken.epoch, 1, W2, [0])).status is MigrateStatus.CLOSED
    record = (await store.read(seq_id)).record
    assert (record.state, record.mig_to) == (SequenceState.DONE, "")
