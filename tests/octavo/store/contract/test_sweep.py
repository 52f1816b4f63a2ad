"""What a sweep finds and does."""

from collections.abc import Callable
from typing import Any

from octavo.request.ids import Incarnation
from octavo.request.record import NewSequence, SequenceState
from octavo.request.sampling import FinishReason
from octavo.store.calls import (
    Finish,
    Member,
    OwnedSequence,
    QueueLimits,
    SweepReport,
    TakeReason,
)

ROUTER_LOSS_MS = 30_000
ROUTER, OTHER = Incarnation("router1"), Incarnation("router2")
W1, W2 = Incarnation("worker1"), Incarnation("worker2")
LIMITS = QueueLimits()
New = Callable[..., NewSequence]


async def test_a_claim_that_is_not_used_returns_to_the_queue(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    assert len(await bench.store.pop("model", 1, 100)) == 1
    assert await bench.store.pop("model", 1, 100) == []
    await bench.advance(101)
    assert (await bench.store.sweep(10, 1000)).requeued == [new().seq_id]
    assert len(await bench.store.pop("model", 1, 100)) == 1


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
    await bench.advance(1)
    for _ in range(2):
        assert (await bench.store.sweep(10, 1000)).orphans == [OwnedSequence(seq_id, epoch)]
    await bench.take_ownership(seq_id, epoch, W2, "t", TakeReason.LEASE)
    await bench.store.heartbeat(Member("worker", W2, b""), 1000)
    assert (await bench.store.sweep(10, 1000)).orphans == []


async def test_orphans_are_those_of_dead_owners_in_the_order_of_the_queue(bench: Any, new: New) -> None:
    await bench.store.heartbeat(Member("router", ROUTER, b""), 100_000)
    await bench.store.heartbeat(Member("worker", W1, b""), 100_000)
    await bench.store.heartbeat(Member("worker", W2, b""), 1000)
    await bench.run(new("lives"), W1)
    names = {"later": 3, "latest": 3, "urgent": 2}
    for name, priority in names.items():
        await bench.run(new(name, priority=priority), W2)
    await bench.advance(1000)
    swept = await bench.store.sweep(2, 1000)
    assert [orphan.seq_id for orphan in swept.orphans] == [new("urgent").seq_id, new("later").seq_id]


async def test_orphans_that_nobody_takes_keep_none_of_another_owner_waiting(bench: Any, new: New) -> None:
    """As those of a model whose workers are all gone do not."""
    await bench.store.heartbeat(Member("worker", W1, b""), 1000)
    await bench.store.heartbeat(Member("worker", W2, b""), 2000)
    for name, owner in (("a", W1), ("b", W1), ("c", W1), ("d", W2)):
        await bench.run(new(name), owner)
    await bench.advance(2000)
    for _ in range(2):
        assert [each.seq_id for each in (await bench.store.sweep(2, 1000)).orphans] == [
            new("a").seq_id,
            new("d").seq_id,
        ]


async def test_more_dead_owners_than_the_limit_keep_none_of_them_waiting(bench: Any, new: New) -> None:
    owners = [Incarnation(f"worker{number}") for number in range(5)]
    for owner in owners:
        await bench.run(new(owner), owner)
        await bench.run(new(f"{owner} too"), owner)
    await bench.advance(2000)
    swept = await bench.store.sweep(2, 1000)
    assert {each.seq_id for each in swept.orphans} == {new(owner).seq_id for owner in owners}


async def test_more_dead_routers_than_the_limit_all_lose_a_client(bench: Any, new: New) -> None:
    routers = [Incarnation(f"router{number}") for number in range(3, 6)]
    for router in routers:
        await bench.store.heartbeat(Member("router", router, b""), 1000)
        await bench.store.accept(new(router, router=router), LIMITS)
    await bench.advance(2000)
    await bench.store.sweep(2, 1000)
    for router in routers:
        assert (await bench.store.read(new(router).seq_id)).record.routers == ()


async def test_an_owner_that_has_left_leaves_orphans(bench: Any, new: New) -> None:
    await bench.store.heartbeat(Member("router", ROUTER, b""), 100_000)
    await bench.store.heartbeat(Member("worker", W1, b""), 100_000)
    epoch = await bench.run(new())
    await bench.store.leave(Member("worker", W1, b""))
    assert (await bench.store.sweep(10, 1000)).orphans == [OwnedSequence(new().seq_id, epoch)]


async def test_an_owner_that_never_had_a_lease_is_found(bench: Any, new: New) -> None:
    epoch = await bench.run(new(), W2)
    assert (await bench.store.sweep(10, 1000)).orphans == [OwnedSequence(new().seq_id, epoch)]


async def test_a_sweep_soon_after_another_one_does_nothing(bench: Any, new: New) -> None:
    await bench.run(new(), W2)
    assert (await bench.store.sweep(10, 1000, 500)).orphans
    await bench.advance(499)
    assert await bench.another().sweep(10, 1000, 500) == SweepReport()
    await bench.advance(1)
    assert (await bench.another().sweep(10, 1000, 500)).orphans


async def test_what_runs_past_its_deadline_ends_though_its_owner_hangs(bench: Any, new: New) -> None:
    await bench.run(new(deadline_in_ms=50))
    await bench.advance(2049)
    assert (await bench.store.sweep(10, 1000)).expired == []
    await bench.advance(1)
    assert (await bench.store.sweep(10, 1000)).expired == [new().seq_id]
    assert (await bench.store.read(new().seq_id)).record.finishes == (FinishReason.DEADLINE,)


async def test_what_waits_again_ends_at_its_deadline(bench: Any, new: New) -> None:
    epoch = await bench.run(new(deadline_in_ms=50))
    await bench.store.requeue(new().seq_id, epoch)
    await bench.advance(50)
    assert (await bench.store.sweep(10, 1000)).expired == [new().seq_id]


async def test_owned_is_what_the_records_say(bench: Any, new: New) -> None:
    epochs = [await bench.run(new(name), W1) for name in "abcd"]
    await bench.take_ownership(new("b").seq_id, epochs[1], W2, "t", TakeReason.REFUSED)
    await bench.store.finish(Finish(new("c").seq_id, FinishReason.STOP))
    await bench.store.requeue(new("d").seq_id, epochs[3])
    assert await bench.store.owned(W1) == [OwnedSequence(new("a").seq_id, epochs[0])]
    assert await bench.store.owned(W1, [new("a").seq_id]) == []
    assert await bench.store.owned(W2) == [OwnedSequence(new("b").seq_id, epochs[1] + 1)]


async def test_the_detached_are_cancelled_after_their_grace(bench: Any, new: New) -> None:
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


async def test_a_dead_router_detaches_and_a_living_one_does_not(bench: Any, new: New) -> None:
    await bench.store.accept(new(), LIMITS)
    await bench.store.heartbeat(Member("router", ROUTER, b""), 3000)
    for _ in range(5):
        await bench.advance(1000)
        await bench.store.heartbeat(Member("router", ROUTER, b""), 3000)
        assert (await bench.store.sweep(10, 1500)).cancelled == []
    await bench.advance(3000)
    await bench.store.sweep(10, 1500)  # sees it
    await bench.advance(ROUTER_LOSS_MS + 1499)  # its clients may not know yet that it is dead
    assert (await bench.store.sweep(10, 1500)).cancelled == []
    await bench.advance(1)
    assert (await bench.store.sweep(10, 1500)).cancelled == [new().seq_id]
    assert (await bench.store.read(new().seq_id)).record.state is SequenceState.CANCELLED


async def test_time_in_which_no_router_swept_is_no_grace(bench: Any, new: New) -> None:
    """Nobody could attach then: a router that comes back first lets clients come back."""
    await bench.store.heartbeat(Member("router", ROUTER, b""), 100_000)
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


async def test_sweeps_that_are_a_little_late_count_as_sweeps(bench: Any, new: New) -> None:
    await bench.store.heartbeat(Member("router", ROUTER, b""), 100_000)
    await bench.store.accept(new(), LIMITS)
    await bench.store.sweep(10, 2000, 1000)
    await bench.advance(2000)
    await bench.store.detach(new().seq_id, ROUTER)
    await bench.advance(2000)
    assert (await bench.store.sweep(10, 2000, 1000)).cancelled == [new().seq_id]


async def test_a_router_that_comes_back_is_told_to_attach_again(bench: Any, new: New) -> None:
    router = Member("router", ROUTER, b"")
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


async def test_a_router_that_comes_back_can_say_that_its_client_has_left(bench: Any, new: New) -> None:
    """A sweep has given the clients of a router without a lease more time. This one does not need it."""
    await bench.store.heartbeat(Member("router", ROUTER, b""), 3000)
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
