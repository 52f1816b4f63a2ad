"""Who may run a sequence: takes, leases, crashes, restarts of the server."""

from typing import Any

import pytest

from octavo.request.ids import Incarnation
from octavo.store import calls

ROUTER = Incarnation("router1")
W1, W2, W3, W4 = (Incarnation(f"worker{i}") for i in (1, 2, 3, 4))
LIMITS = calls.QueueLimits()


async def test_a_lease_protects_its_owner(bench: Any, new: Any) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.store.heartbeat(calls.Member("worker", W1, b"info"), 1000)
    assert (await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.LEASE)).status is calls.TakeStatus.ALIVE
    await bench.advance(1000)
    taken = await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.LEASE)
    assert (taken.status, taken.epoch, taken.crashes) == (calls.TakeStatus.OK, epoch + 1, 1)
    [stale] = await bench.store.append_batch(W1, [calls.AppendItem(seq_id, epoch, 0, 0, [1])])
    assert stale.status is calls.AppendStatus.FENCED


async def test_lost_connections_need_a_missed_renewal(bench: Any, new: Any) -> None:
    """One router with a bad connection cannot take sequences from a worker that lives."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    for _ in range(3):
        await bench.store.heartbeat(calls.Member("worker", W1, b"info"), 3000)
        refused = await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.CONNECTION)
        assert (refused.status, refused.retry_ms) == (calls.TakeStatus.ALIVE, 1200)
        await bench.advance(1199)
    refused = await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.CONNECTION)
    assert (refused.status, refused.epoch, refused.crashes, refused.retry_ms) == (calls.TakeStatus.ALIVE, epoch, 0, 1)
    await bench.advance(1)
    assert (await bench.take_ownership(seq_id, epoch, W2, "u", calls.TakeReason.LEASE)).status is calls.TakeStatus.ALIVE
    taken = await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.CONNECTION)
    assert (taken.status, taken.epoch, taken.crashes) == (calls.TakeStatus.OK, epoch + 1, 1)


async def test_a_lost_connection_and_a_broken_lifeline_are_a_death(bench: Any, new: Any) -> None:
    """Neither of them alone, and not a lifeline that the last renewal has not heard."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    worker = calls.Member("worker", W1, b"info")

    async def take(reason: calls.TakeReason) -> calls.TakeStatus:
        return (await bench.take_ownership(seq_id, epoch, W2, "t", reason)).status

    await bench.store.heartbeat(worker, 3000)
    async with bench.lifeline(W1):
        assert await take(calls.TakeReason.CONNECTION) is calls.TakeStatus.ALIVE
    assert await take(calls.TakeReason.CONNECTION) is calls.TakeStatus.ALIVE, "it came after the renewal"
    async with bench.lifeline(W1):
        await bench.store.heartbeat(worker, 3000)
        assert await take(calls.TakeReason.CONNECTION) is calls.TakeStatus.ALIVE
        async with bench.lifeline(W3):
            pass
        assert await take(calls.TakeReason.CONNECTION) is calls.TakeStatus.ALIVE, "another one has died"
    assert await take(calls.TakeReason.LEASE) is calls.TakeStatus.ALIVE
    taken = await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.CONNECTION)
    assert (taken.status, taken.epoch, taken.crashes) == (calls.TakeStatus.OK, epoch + 1, 1)


async def test_a_restart_ends_all_lifelines_and_nobody_is_taken_for_dead(bench: Any, new: Any) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    async with bench.lifeline(W1):
        await bench.store.heartbeat(calls.Member("worker", W1, b""), 3000)
    await bench.restart()
    taken = await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.CONNECTION)
    assert taken.status is calls.TakeStatus.FROZEN
    await bench.store.heartbeat(calls.Member("worker", W1, b""), 30_000)
    await bench.advance(4000)
    taken = await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.CONNECTION)
    assert taken.status is calls.TakeStatus.ALIVE


@pytest.mark.parametrize("lease_ms", [300, 3000, 20_000])
async def test_a_restart_freezes_takes_for_one_lease(bench: Any, new: Any, lease_ms: int) -> None:
    """Every member must have had the time to renew its lease."""
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.store.heartbeat(calls.Member("worker", W1, b""), lease_ms)
    await bench.store.heartbeat(calls.Member("router", ROUTER, b""), lease_ms // 2)
    await bench.advance(3600_000)  # however long the store was away
    before = bench.store.generation
    await bench.restart()
    freeze_ms = lease_ms + 1000
    frozen = await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.CONNECTION)
    assert (frozen.status, frozen.retry_ms) == (calls.TakeStatus.FROZEN, freeze_ms)
    assert bench.store.generation > before
    await bench.advance(freeze_ms - 1)
    assert (await bench.store.sweep(10, 10_000)).orphans == []
    assert (
        await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.LEASE)
    ).status is calls.TakeStatus.FROZEN
    await bench.advance(1)
    assert (await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.LEASE)).status is calls.TakeStatus.OK


async def test_a_change_of_numerics_is_told(bench: Any, new: Any) -> None:
    """Not before the first token, and not where one of the classes is not known."""
    seq_id = new().seq_id
    await bench.store.accept(new(), LIMITS)
    told, classes = [], ("a", "b", "b", "c", "", "a")
    for epoch, numerics in enumerate(classes):
        reason = calls.TakeReason.REFUSED if epoch else calls.TakeReason.QUEUED
        await bench.store.take_ownership(calls.TakeRequest(seq_id, epoch, W1, f"t{epoch}", reason, numerics=numerics))
        if epoch == 1:
            await bench.store.append_batch(W1, [calls.AppendItem(seq_id, 2, 0, 0, [1])])
        record = (await bench.store.read(seq_id)).record
        told.append((record.numerics, record.numerics_changes))
    assert told == [("a", 0), ("b", 0), ("b", 0), ("c", 1), ("", 1), ("a", 1)]
    assert [entry.detail for entry in record.timeline if entry.what == "numerics"] == ["b c"]


async def test_a_timeline_says_in_one_line_why_an_owner_lost_a_sequence(bench: Any, new: Any) -> None:
    seq_id, why = new().seq_id, "worker w1: Schedule:\n DEADLINE_EXCEEDED"
    await bench.store.accept(new(), LIMITS)
    await bench.take_ownership(seq_id, 0, W1, "t0", calls.TakeReason.QUEUED)
    taking = calls.TakeRequest(seq_id, 1, W2, "t1", calls.TakeReason.REFUSED, seen=why)
    assert (await bench.store.take_ownership(taking)).status is calls.TakeStatus.OK
    assert await bench.store.requeue(seq_id, 2, "x" * 10_000)
    await bench.take_ownership(seq_id, 3, W2, "t3", calls.TakeReason.QUEUED)
    assert await bench.store.requeue(seq_id, 4)
    details = [entry.detail for entry in (await bench.store.read(seq_id)).record.timeline[1:]]
    assert details == [
        f"{W1} queued",
        f"{W2} refused worker w1: Schedule: DEADLINE_EXCEEDED",
        f"{W2} " + "x" * calls.MAX_SEEN,
        f"{W2} queued",
        W2,
    ]
