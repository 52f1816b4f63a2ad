"""What a sweep finds and does."""

from collections.abc import Callable
from typing import Any

from octavo.ids import Incarnation
from octavo.record import NewSequence, SequenceState
from octavo.store.calls import Member, OrphanedSequence, QueueLimits

ROUTER, OTHER = Incarnation("router1"), Incarnation("router2")
W1 = Incarnation("worker1")
LIMITS = QueueLimits()
New = Callable[..., NewSequence]


async def test_a_claim_that_is_not_used_returns_to_the_queue(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    assert len(await bench.store.pop(ROUTER, 1, 100)) == 1
    assert await bench.store.pop(OTHER, 1, 100) == []
    await bench.advance(101)
    assert (await bench.store.sweep(10, 1000)).requeued == [new().seq_id]
    assert len(await bench.store.pop(OTHER, 1, 100)) == 1


async def test_sweep_ends_what_waits_past_its_deadline(bench: Any, new: New) -> None:
    await bench.store.accept(new(deadline_in_ms=50), LIMITS)
    await bench.advance(2000)
    assert (await bench.store.sweep(10, 1000)).expired == [new().seq_id]
    assert (await bench.store.sweep(10, 1000)).expired == []


async def test_orphans_are_reported_again_until_somebody_takes_them(bench: Any, new: New) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.store.heartbeat(Member("worker", W1, b""), 1000)
    await bench.store.heartbeat(Member("router", ROUTER, b""), 100_000)
    await bench.advance(999)
    assert (await bench.store.sweep(10, 1000)).orphans == []
    for _ in range(2):
        await bench.advance(1001)
        assert (await bench.store.sweep(10, 1000)).orphans == [OrphanedSequence(seq_id, epoch)]
        assert (await bench.store.sweep(10, 1000)).orphans == []  # not twice in a moment


async def test_the_detached_are_cancelled_after_their_grace(bench: Any, new: New) -> None:
    for name, keep in (("leaves", False), ("keeps", True)):
        await bench.run(new(name, keep_on_disconnect=keep))
        await bench.store.detach(new(name).seq_id, OTHER)  # not attached: no effect
        assert (await bench.store.read(new(name).seq_id)).record.router == ROUTER
        await bench.store.detach(new(name).seq_id, ROUTER)
    await bench.advance(1999)
    assert (await bench.store.sweep(10, 2000)).cancelled == []
    await bench.advance(1)
    assert (await bench.store.sweep(10, 2000)).cancelled == [new("leaves").seq_id]
    record = (await bench.store.read(new("leaves").seq_id)).record
    assert (record.state, record.cancel) == (SequenceState.RUNNING, True)


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
    assert (await bench.store.read(new().seq_id)).record.state is SequenceState.CANCELLED


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
