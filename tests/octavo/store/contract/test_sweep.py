"""What a sweep finds and does."""

from typing import Any

from octavo.request.ids import Incarnation
from octavo.request.record import SequenceState
from octavo.store import calls

ROUTER_LOSS_MS = 30_000
ROUTER, OTHER = Incarnation("router1"), Incarnation("router2")
W1, W2 = Incarnation("worker1"), Incarnation("worker2")
LIMITS = calls.QueueLimits()


async def test_an_unused_claim_returns_to_the_queue(bench: Any, new: Any) -> None:
    await bench.store.accept(new(), LIMITS)
    assert len(await bench.store.pop("model", 1, 100)) == 1
    assert await bench.store.pop("model", 1, 100) == []
    await bench.advance(101)
    assert (await bench.store.sweep(10, 1000)).requeued == [new().seq_id]
    assert len(await bench.store.pop("model", 1, 100)) == 1


async def test_sweep_ends_what_waits_past_its_deadline(bench: Any, new: Any) -> None:
    await bench.store.accept(new(deadline_in_ms=50), LIMITS)
    await bench.advance(2000)
    assert (await bench.store.sweep(10, 1000)).expired == [new().seq_id]
    assert (await bench.store.sweep(10, 1000)).expired == []


async def test_orphans_are_reported_again_until_somebody_takes_them(bench: Any, new: Any) -> None:
    seq_id, epoch = new().seq_id, await bench.run(new())
    await bench.store.heartbeat(calls.Member("worker", W1, b""), 1000)
    await bench.store.heartbeat(calls.Member("router", ROUTER, b""), 100_000)
    await bench.advance(999)
    assert (await bench.store.sweep(10, 1000)).orphans == []
    await bench.advance(1)
    for _ in range(2):
        assert (await bench.store.sweep(10, 1000)).orphans == [calls.OwnedSequence(seq_id, epoch)]
    await bench.take_ownership(seq_id, epoch, W2, "t", calls.TakeReason.LEASE)
    await bench.store.heartbeat(calls.Member("worker", W2, b""), 1000)
    assert (await bench.store.sweep(10, 1000)).orphans == []


async def test_untaken_orphans_keep_no_others_waiting(bench: Any, new: Any) -> None:
    """As those of a model whose workers are all gone do not."""
    await bench.store.heartbeat(calls.Member("worker", W1, b""), 1000)
    await bench.store.heartbeat(calls.Member("worker", W2, b""), 2000)
    for name, owner in (("a", W1), ("b", W1), ("c", W1), ("d", W2)):
        await bench.run(new(name), owner)
    await bench.advance(2000)
    for _ in range(2):
        assert [each.seq_id for each in (await bench.store.sweep(2, 1000)).orphans] == [
            new("a").seq_id,
            new("d").seq_id,
        ]


async def test_the_detached_are_cancelled_after_their_grace(bench: Any, new: Any) -> None:
    for name, keep in (("leaves", False), ("keeps", True)):
        await bench.run(new(name, keep_on_disconnect=keep))
        await bench.store.detach(new(name).seq_id, OTHER)  # not attached: no effect
        assert (await bench.store.read(new(name).seq_id)).record.routers == (ROUTER,)
        await bench.store.detach(new(name).seq_id, ROUTER)
    await bench.advance(1999)
    assert (await bench.store.sweep(10, 2000)).cancelled == []
    await bench.advance(1)
    assert (await bench.store.sweep(10, 2000)).cancelled == [new("leaves").seq_id]
    record = (await bench.store.read(new("leaves").seq_id)).record
    assert (record.state, record.cancel) == (SequenceState.RUNNING, True)


async def test_only_a_dead_router_detaches(bench: Any, new: Any) -> None:
    await bench.store.accept(new(), LIMITS)
    await bench.store.heartbeat(calls.Member("router", ROUTER, b""), 3000)
    for _ in range(5):
        await bench.advance(1000)
        await bench.store.heartbeat(calls.Member("router", ROUTER, b""), 3000)
        assert (await bench.store.sweep(10, 1500)).cancelled == []
    await bench.advance(3000)
    await bench.store.sweep(10, 1500)  # sees it
    await bench.advance(ROUTER_LOSS_MS + 1499)  # its clients may not know yet that it is dead
    assert (await bench.store.sweep(10, 1500)).cancelled == []
    await bench.advance(1)
    assert (await bench.store.sweep(10, 1500)).cancelled == [new().seq_id]
    assert (await bench.store.read(new().seq_id)).record.state is SequenceState.CANCELLED


async def test_time_without_sweeps_is_no_grace(bench: Any, new: Any) -> None:
    """Nobody could attach then: a router that comes back first lets clients come back."""
    await bench.store.heartbeat(calls.Member("router", ROUTER, b""), 100_000)
    await bench.store.accept(new(), LIMITS)
    await bench.store.sweep(10, 2000, 1000)
    await bench.store.detach(new().seq_id, ROUTER)
    await bench.advance(1000)
    assert (await bench.store.sweep(10, 2000, 1000)).cancelled == []
    await bench.advance(60_000)  # no router lives
    for _ in range(2):
        assert (await bench.another().sweep(10, 2000, 1000)).cancelled == []
        await bench.advance(1000)
    assert (await bench.another().sweep(10, 2000, 1000)).cancelled == [new().seq_id]


async def test_a_returning_router_attaches_again(bench: Any, new: Any) -> None:
    router = calls.Member("router", ROUTER, b"")
    assert (await bench.store.heartbeat(router, 3000)).lapsed
    assert not (await bench.store.heartbeat(router, 3000)).lapsed
    await bench.store.accept(new(), LIMITS)
    await bench.store.attach(new().seq_id, OTHER)
    await bench.advance(3000)
    await bench.store.sweep(10, 5000)
    record = (await bench.store.read(new().seq_id)).record
    assert (record.routers, record.detached_since_ms) == ((), record.accepted_ms + 3000 + ROUTER_LOSS_MS)
    assert (await bench.store.heartbeat(router, 3000)).lapsed
    record = await bench.store.attach(new().seq_id, ROUTER)
    assert (record.routers, record.detached_since_ms) == ((ROUTER,), 0)


async def test_a_returning_router_may_have_lost_its_client(bench: Any, new: Any) -> None:
    """A sweep has given the clients of a router without a lease more time. This one does not need it."""
    await bench.store.heartbeat(calls.Member("router", ROUTER, b""), 3000)
    for name in ("a", "b"):
        await bench.store.accept(new(name), LIMITS)
    await bench.advance(3000)
    await bench.store.sweep(10, 5000)
    await bench.advance(1000)
    await bench.store.detach(new("a").seq_id, ROUTER)
    record = (await bench.store.read(new("a").seq_id)).record
    assert (record.routers, record.detached_since_ms) == ((), record.accepted_ms + 4000)
    await bench.advance(500)
    await bench.store.detach(new("a").seq_id, ROUTER)
    assert (await bench.store.read(new("a").seq_id)).record.detached_since_ms == record.detached_since_ms
    await bench.advance(4500)
    assert (await bench.store.sweep(10, 5000)).cancelled == [new("a").seq_id]
