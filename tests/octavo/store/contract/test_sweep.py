"""What a sweep finds and does."""

from octavo.request.ids import Incarnation
from octavo.request.record import SequenceState
from octavo.store.calls import Member, QueueLimits

ROUTER_LOSS_MS = 30_000
ROUTER = Incarnation("router1")
W1, W2 = Incarnation("worker1"), Incarnation("worker2")
FIRST, SECOND, ATTACHED = Member("worker", W1, b""), Member("worker", W2, b""), Member("router", ROUTER, b"")
LIMITS = QueueLimits()


async def test_claims_return_and_what_waits_too_long_ends(bench, new):
    await bench.store.accept(new(deadline_in_ms=2000), LIMITS)
    assert len(await bench.store.pop("model", 1, 100)) == 1
    assert await bench.store.pop("model", 1, 100) == []
    await bench.advance(101)
    assert (await bench.store.sweep(10, 1000)).requeued == [new().seq_id]
    assert len(await bench.store.pop("model", 1, 10_000)) == 1
    await bench.advance(2000)
    assert (await bench.store.sweep(10, 1000)).expired == [new().seq_id]
    assert (await bench.store.sweep(10, 1000)).expired == []


async def test_untaken_orphans_keep_no_others_waiting(bench, new):
    """As those of a model whose workers are all gone do not."""
    await bench.store.heartbeat(FIRST, 1000)
    await bench.store.heartbeat(SECOND, 2000)
    for name, owner in (("a", W1), ("b", W1), ("c", W1), ("d", W2)):
        await bench.run(new(name), owner)
    await bench.advance(2000)
    for _ in range(2):
        found = [each.seq_id for each in (await bench.store.sweep(2, 1000)).orphans]
        assert found == [new("a").seq_id, new("d").seq_id]


async def test_only_a_dead_router_detaches(bench, new):
    await bench.store.accept(new(), LIMITS)
    await bench.store.heartbeat(ATTACHED, 3000)
    for _ in range(5):
        await bench.advance(1000)
        await bench.store.heartbeat(ATTACHED, 3000)
        assert (await bench.store.sweep(10, 1500)).cancelled == []
    await bench.advance(3000)
    await bench.store.sweep(10, 1500)  # sees it
    await bench.advance(ROUTER_LOSS_MS + 1499)  # its clients may not know yet that it is dead
    assert (await bench.store.sweep(10, 1500)).cancelled == []
    await bench.advance(1)
    assert (await bench.store.sweep(10, 1500)).cancelled == [new().seq_id]
    assert (await bench.record(new().seq_id)).state is SequenceState.CANCELLED


async def test_time_without_sweeps_is_no_grace(bench, new):
    """Nobody could attach then: a router that comes back first lets clients come back."""
    await bench.store.heartbeat(ATTACHED, 100_000)
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


async def test_a_returning_router_may_have_lost_its_client(bench, new):
    """A sweep has given the clients of a router without a lease more time. This one does not need it."""
    await bench.store.heartbeat(ATTACHED, 3000)
    for name in ("a", "b"):
        await bench.store.accept(new(name), LIMITS)
    await bench.advance(3000)
    await bench.store.sweep(10, 5000)
    await bench.advance(1000)
    await bench.store.detach(new("a").seq_id, ROUTER)
    record = await bench.record(new("a").seq_id)
    assert (record.routers, record.detached_since_ms) == ((), record.accepted_ms + 4000)
    await bench.advance(500)
    await bench.store.detach(new("a").seq_id, ROUTER)
    assert (await bench.record(new("a").seq_id)).detached_since_ms == record.detached_since_ms
    await bench.advance(4500)
    assert (await bench.store.sweep(10, 5000)).cancelled == [new("a").seq_id]
