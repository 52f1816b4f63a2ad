"""A sequence that moves while it runs: of begin, commit and abort of one number, in any order, one thing comes."""

from octavo.request.ids import Incarnation
from octavo.store.calls import AppendStatus, MigrateStatus

W2, W3 = Incarnation("worker2"), Incarnation("worker3")


async def test_a_commit_makes_the_target_the_owner(bench, new):
    seq_id, epoch, store = new().seq_id, await bench.run(new()), bench.store
    await bench.append(seq_id, epoch, 0, [1, 2])
    for status in (MigrateStatus.OK, MigrateStatus.SAME):
        assert (await store.mig_begin(seq_id, epoch, 1, W2)).status is status
    assert (await store.mig_commit(seq_id, epoch, 1, W2, [1])).status is MigrateStatus.GAP
    assert (await store.mig_commit(seq_id, epoch, 1, W3, [2])).status is MigrateStatus.NO_MIGRATION
    for status in (MigrateStatus.OK, MigrateStatus.SAME):
        committed = await store.mig_commit(seq_id, epoch, 1, W2, [2])
        assert (committed.status, committed.epoch) == (status, epoch + 1)
    assert (await store.mig_commit(seq_id, epoch, 1, W3, [2])).status is MigrateStatus.FENCED
    assert (await store.mig_abort(seq_id, epoch, 1)).status is MigrateStatus.COMMITTED
    assert (await bench.append(seq_id, epoch, 2, [3])).status is AppendStatus.FENCED  # I8
    assert (await bench.append(seq_id, epoch + 1, 2, [3], owner=W2)).status is AppendStatus.OK


async def test_a_migration_replaces_an_older_one(bench, new):
    seq_id, epoch, store = new().seq_id, await bench.run(new()), bench.store
    await store.mig_begin(seq_id, epoch, 1, W2)
    assert (await store.mig_begin(seq_id, epoch, 1, W3)).status is MigrateStatus.OUTDATED
    assert (await store.mig_begin(seq_id, epoch, 2, W3)).status is MigrateStatus.OK
    assert (await store.mig_commit(seq_id, epoch, 1, W2, [0])).status is MigrateStatus.NO_MIGRATION
    assert (await store.mig_abort(seq_id, epoch, 1)).status is MigrateStatus.ABORTED  # and the newer one goes on
    assert (await store.mig_commit(seq_id, epoch, 2, W3, [0])).status is MigrateStatus.OK
