"""What processes know of each other: members, lists, secrets, notices, the generation."""

import asyncio
from dataclasses import replace

import pytest

from octavo.request.ids import Incarnation
from octavo.store.calls import Member, NameHolder, Notice, WorkerLimits

ROUTER, OTHER = Incarnation("router1"), Incarnation("router2")
W1, W2 = Incarnation("worker1"), Incarnation("worker2")


async def test_limits_of_workers_are_remembered_for_a_while(bench):
    small = WorkerLimits("the model", "f", 100, 16, 10, 0, 1)
    large = replace(small, num_blocks=1000)
    assert await bench.store.note_limits([large], 5000) == [large]
    await bench.advance(3000)
    for _ in range(2):  # to ask is not to see
        assert await bench.store.note_limits([small], 5000) == [small, large]
    await bench.advance(2001)
    assert await bench.store.note_limits([], 5000) == [small]
    await bench.advance(5000)
    assert await bench.store.note_limits([large], 5000) == [large]


@pytest.mark.parametrize("kind", ["prefix", "adapter"])
async def test_what_has_a_name_stays_until_it_is_dropped(bench, kind):
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


async def test_a_renewed_lease_holds_a_name(bench):
    """A name that somebody else has taken gets no lease; at the same endpoint a process takes its own name over."""
    store = bench.store

    def named(worker, endpoint, name="worker-0"):
        return Member("worker", worker, b"", name, endpoint)

    old, new, again = named(W1, "10.0.0.1:7"), named(W2, "10.0.0.2:7"), named(W2, "10.0.0.1:7")
    assert (await store.heartbeat(old, 1000)).holder is None
    assert await store.register(replace(new, name="worker-1"), 1000) is None
    first = await store.register(new, 1000)
    assert (first.id, first.endpoint) == (W1, "10.0.0.1:7")
    await bench.advance(400)
    assert await store.register(new, 1000) == first
    assert (await store.heartbeat(old, 1000)).holder is None
    assert await store.register(new, 1000) == NameHolder(W1, "10.0.0.1:7", first.until_ms + 400)
    await bench.advance(1000)
    assert await store.register(new, 1000) is None
    assert await store.members("worker") == []  # to register is no lease
    assert (await store.heartbeat(new, 1000)).holder is None
    holder = (await store.heartbeat(old, 1000)).holder
    assert (holder.id, holder.endpoint) == (W2, "10.0.0.2:7")
    assert [member.id for member in await store.members("worker")] == [W2]
    await store.leave(old)  # it has no name to give up
    assert (await store.heartbeat(old, 1000)).holder.id == W2
    await store.leave(new)
    assert (await store.heartbeat(old, 1000)).holder is None
    assert await store.register(again, 1000) is None
    assert (await store.heartbeat(old, 1000)).holder.id == W2
    assert (await store.heartbeat(again, 1000)).holder is None


async def test_notices_reach_the_attached_router(bench, new):
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
    expected = [("taken", epoch, W1), ("queued", epoch + 1, Incarnation("")), ("ended", epoch + 1, Incarnation(""))]
    assert notices == [Notice(request.seq_id, *each) for each in expected]


async def test_processes_share_secrets(bench):
    assert await bench.store.secret("x") == await bench.another().secret("x") != await bench.store.secret("y")


async def test_models_are_described_for_who_meets_no_worker(bench):
    assert await bench.store.model_descriptions() == {}
    for name, description in (("a", b"1"), ("b", b"\xff"), ("a", b"")):
        await bench.store.describe_model(name, description)
    assert await bench.another().model_descriptions() == {"a": b"", "b": b"\xff"}
