"""What processes know of each other: members, lists, secrets, notices, the generation."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from octavo.request.ids import Incarnation
from octavo.request.record import SequenceState
from octavo.store.calls import Member, NameHolder, Notice, QueueLimits, WorkerLimits

LIMITS = QueueLimits()


ROUTER, OTHER = Incarnation("router1"), Incarnation("router2")
W1, W2 = Incarnation("worker1"), Incarnation("worker2")


async def test_members_come_and_go(bench: Any) -> None:
    first, second = Member("worker", W1, b"\xff1"), Member("worker", W2, b"2")
    await bench.store.heartbeat(first, 1000)
    await bench.store.heartbeat(second, 3000)
    await bench.store.heartbeat(Member("router", ROUTER, b"r"), 3000)
    assert await bench.store.members("worker") == [first, second]
    await bench.advance(1000)
    assert await bench.store.members("worker") == [second]
    await bench.store.heartbeat(Member("worker", W2, b"changed"), 3000)
    assert await bench.store.members("worker") == [Member("worker", W2, b"changed")]
    await bench.store.heartbeat(first, 1000)  # back again
    assert [member.id for member in await bench.store.members("worker")] == [W1, W2]
    await bench.store.leave(first)
    await bench.store.leave(second)
    assert await bench.store.members("worker") == []
    assert await bench.store.members("router") == [Member("router", ROUTER, b"r")]


async def test_limits_of_workers_are_remembered_for_a_while(bench: Any) -> None:
    small = WorkerLimits("the model", "f", 100, 16, 10, 0, 1)
    large = replace(small, num_blocks=1000)
    assert await bench.store.note_limits([large], 5000) == [large]
    await bench.advance(3000)
    assert await bench.store.note_limits([small], 5000) == [small, large]
    assert await bench.store.note_limits([small], 5000) == [small, large]  # to ask is not to see
    await bench.advance(2001)
    assert await bench.store.note_limits([], 5000) == [small]
    await bench.advance(5000)
    assert await bench.store.note_limits([large], 5000) == [large]


@pytest.mark.parametrize("kind", ["prefix", "adapter"])
async def test_what_has_a_name_stays_until_it_is_dropped(bench: Any, kind: str) -> None:
    put, drop = (getattr(bench.store, f"{what}_{kind}") for what in ("put", "drop"))
    both = bench.store.prefixes, bench.store.adapters
    listed, others = both if kind == "prefix" else reversed(both)
    assert await listed() == {} and not await drop("a")
    assert await put("a", b"\xff1", 2) and await put("b", b"", 2)
    assert not await put("c", b"3", 2)
    assert await put("a", b"2", 2)  # another value of a known name
    assert await listed() == await listed() == {"a": b"2", "b": b""}
    assert await drop("a")
    assert await listed() == {"b": b""} and await others() == {}


def named(worker: Incarnation, endpoint: str, name: str = "worker-0") -> Member:
    return Member("worker", worker, b"", name, endpoint)


async def test_a_renewed_lease_holds_a_name(bench: Any) -> None:
    old, new, third = named(W1, "10.0.0.1:7"), named(W2, "10.0.0.2:7"), named(W2, "10.0.0.2:7", "worker-1")
    assert (await bench.store.heartbeat(old, 1000)).holder is None
    assert await bench.store.register(third, 1000) is None
    first = await bench.store.register(new, 1000)
    assert (first.id, first.endpoint) == (W1, "10.0.0.1:7")
    await bench.advance(400)
    assert await bench.store.register(new, 1000) == first
    assert (await bench.store.heartbeat(old, 1000)).holder is None
    assert await bench.store.register(new, 1000) == NameHolder(W1, "10.0.0.1:7", first.until_ms + 400)
    await bench.advance(1000)
    assert await bench.store.register(new, 1000) is None


async def test_a_taken_name_gets_no_lease(bench: Any) -> None:
    old, new = named(W1, "10.0.0.1:7"), named(W2, "10.0.0.2:7")
    await bench.store.heartbeat(old, 1000)
    await bench.advance(1000)
    assert await bench.store.register(new, 1000) is None
    assert await bench.store.members("worker") == []  # to register is no lease
    assert (await bench.store.heartbeat(new, 1000)).holder is None
    holder = (await bench.store.heartbeat(old, 1000)).holder
    assert (holder.id, holder.endpoint) == (W2, "10.0.0.2:7")
    assert [member.id for member in await bench.store.members("worker")] == [W2]
    await bench.store.leave(old)  # it has no name to give up
    assert (await bench.store.heartbeat(old, 1000)).holder.id == W2
    await bench.store.leave(new)
    assert (await bench.store.heartbeat(old, 1000)).holder is None


async def test_a_member_at_the_same_endpoint_takes_over(bench: Any) -> None:
    old, new = named(W1, "10.0.0.1:7"), named(W2, "10.0.0.1:7")
    await bench.store.heartbeat(old, 1000)
    assert await bench.store.register(new, 1000) is None
    assert (await bench.store.heartbeat(old, 1000)).holder.id == W2
    assert (await bench.store.heartbeat(new, 1000)).holder is None


async def test_notices_reach_the_attached_router(bench: Any, new: Any) -> None:
    stream = bench.store.notices(ROUTER)
    waiting = asyncio.ensure_future(anext(stream))
    await bench.listening(ROUTER)
    request = new()
    epoch = await bench.run(request)
    await bench.store.attach(request.seq_id, ROUTER)
    await bench.run(new("elsewhere", router=OTHER))  # of this one, nothing
    assert await bench.store.requeue(request.seq_id, epoch)
    await bench.store.cancel(request.seq_id)
    async with asyncio.timeout(5):
        notices = [await waiting] + [await anext(stream) for _ in range(2)]
    await stream.aclose()
    assert notices == [
        Notice(request.seq_id, "taken", epoch, W1),
        Notice(request.seq_id, "queued", epoch + 1, Incarnation("")),
        Notice(request.seq_id, "ended", epoch + 1, Incarnation("")),
    ]


async def test_another_process_learns_the_generation(bench: Any, new: Any) -> None:
    other = bench.another()
    await other.open()
    before = other.generation
    await bench.restart()
    await bench.store.accept(new(), LIMITS)
    assert (await other.read(new().seq_id)).record.state is SequenceState.QUEUED
    await asyncio.gather(*(other.queue_depth() for _ in range(4)))
    assert other.generation == bench.store.generation > before
