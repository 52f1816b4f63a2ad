"""Who may run a sequence: takes, leases, crashes, restarts of the server."""

import pytest

from octavo.request.ids import Incarnation
from octavo.store.calls import AppendStatus, Member, QueueLimits, TakeReason, TakeStatus

ROUTER = Incarnation("router1")
W1, W2, W3 = (Incarnation(f"worker{i}") for i in (1, 2, 3))
OWNER = Member("worker", W1, b"info")
OK, ALIVE, FROZEN = TakeStatus.OK, TakeStatus.ALIVE, TakeStatus.FROZEN
CONNECTION, LEASE, QUEUED, REFUSED = TakeReason.CONNECTION, TakeReason.LEASE, TakeReason.QUEUED, TakeReason.REFUSED


async def test_a_missed_renewal_and_a_lost_connection_or_the_end_of_the_lease_are_a_death(bench, new):
    """One router with a bad connection cannot take sequences from a worker that lives."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    for _ in range(3):
        await bench.store.heartbeat(OWNER, 3000)
        refused = await bench.take(seq_id, epoch, W2, CONNECTION)
        assert (refused.status, refused.retry_ms) == (ALIVE, 1200)
        await bench.advance(1199)
    refused = await bench.take(seq_id, epoch, W2, CONNECTION)
    assert (refused.status, refused.epoch, refused.crashes, refused.retry_ms) == (ALIVE, epoch, 0, 1)
    await bench.advance(1)
    assert (await bench.take(seq_id, epoch, W2, LEASE, "u")).status is ALIVE
    taken = await bench.take(seq_id, epoch, W2, CONNECTION)
    assert (taken.status, taken.epoch, taken.crashes) == (OK, epoch + 1, 1)
    assert (await bench.append(seq_id, epoch, 0, [1])).status is AppendStatus.FENCED

    await bench.store.heartbeat(Member("worker", W2, b"info"), 1000)
    assert (await bench.take(seq_id, epoch + 1, W3, LEASE)).status is ALIVE
    await bench.advance(1000)
    assert (await bench.take(seq_id, epoch + 1, W3, LEASE)).status is OK


async def test_a_lost_connection_and_a_broken_lifeline_are_a_death(bench, new):
    """Neither of them alone, and not a lifeline that the last renewal has not heard."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.store.heartbeat(OWNER, 3000)
    async with bench.lifeline(W1):
        assert (await bench.take(seq_id, epoch, W2, CONNECTION)).status is ALIVE
    assert (await bench.take(seq_id, epoch, W2, CONNECTION)).status is ALIVE, "it came after the renewal"
    async with bench.lifeline(W1):
        await bench.store.heartbeat(OWNER, 3000)
        assert (await bench.take(seq_id, epoch, W2, CONNECTION)).status is ALIVE
        async with bench.lifeline(W3):
            pass
        assert (await bench.take(seq_id, epoch, W2, CONNECTION)).status is ALIVE, "another one has died"
    assert (await bench.take(seq_id, epoch, W2, LEASE)).status is ALIVE
    taken = await bench.take(seq_id, epoch, W2, CONNECTION)
    assert (taken.status, taken.epoch, taken.crashes) == (OK, epoch + 1, 1)


async def test_a_restart_ends_all_lifelines_and_nobody_is_taken_for_dead(bench, new):
    seq_id, epoch = new().seq_id, await bench.run(new())
    async with bench.lifeline(W1):
        await bench.store.heartbeat(OWNER, 3000)
    await bench.restart()
    assert (await bench.take(seq_id, epoch, W2, CONNECTION)).status is FROZEN
    await bench.store.heartbeat(OWNER, 30_000)
    await bench.advance(4000)
    assert (await bench.take(seq_id, epoch, W2, CONNECTION)).status is ALIVE


@pytest.mark.parametrize("lease_ms", [300, 20_000])
async def test_a_restart_freezes_takes_for_one_lease(bench, new, lease_ms):
    """Every member must have had the time to renew its lease."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.store.heartbeat(OWNER, lease_ms)
    await bench.store.heartbeat(Member("router", ROUTER, b""), lease_ms // 2)
    await bench.advance(3600_000)  # however long the store was away
    before = bench.store.generation
    await bench.restart()
    frozen = await bench.take(seq_id, epoch, W2, CONNECTION)
    assert (frozen.status, frozen.retry_ms) == (FROZEN, lease_ms + 1000)
    assert bench.store.generation > before
    await bench.advance(lease_ms + 999)
    assert (await bench.store.sweep(10, 10_000)).orphans == []
    assert (await bench.take(seq_id, epoch, W2, LEASE)).status is FROZEN
    await bench.advance(1)
    assert (await bench.take(seq_id, epoch, W2, LEASE)).status is OK


async def test_a_change_of_numerics_is_told(bench, new):
    """Not before the first token, and not where one of the classes is not known."""
    seq_id = new().seq_id
    await bench.store.accept(new(), QueueLimits())
    told = []
    for epoch, numerics in enumerate(("a", "b", "b", "c", "", "a")):
        await bench.take(seq_id, epoch, W1, REFUSED if epoch else QUEUED, f"t{epoch}", numerics=numerics)
        if epoch == 1:
            await bench.append(seq_id, 2, 0, [1])
        record = await bench.record(seq_id)
        told.append((record.numerics, record.numerics_changes))
    assert told == [("a", 0), ("b", 0), ("b", 0), ("c", 1), ("", 1), ("a", 1)]
    assert [entry.detail for entry in record.timeline if entry.what == "numerics"] == ["b c"]
