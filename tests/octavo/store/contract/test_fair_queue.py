"""The order of the queue: tenants in turn, classes with a head start, and charges that follow what was computed."""

from typing import Any

from octavo.request.ids import Incarnation, RequestId, sequence_id
from octavo.request.record import NewSequence
from octavo.request.sampling import FinishReason
from octavo.store.calls import AcceptStatus, AppendItem, Finish, QueueBound, QueueDepth, QueueLimits, TakeReason

W1 = Incarnation("worker1")
LIMITS = QueueLimits(max_requests=1000, max_tokens=64_000)  # a head start of 1000 tokens
SYSTEM, INTERACTIVE, DEFAULT, BULK = 1, 2, 3, 4
CHARGE = 131  # of a sequence of `new`: 3 tokens of prompt, and twice 64 of output


class Tenants:
    """Sequences that are named after their tenant: "x1" is one of tenant x."""

    def __init__(self, bench: Any, new: Any) -> None:
        self.bench, self.store, self.new = bench, bench.store, new

    def request(self, name: str, **changes: Any) -> NewSequence:
        changes = {"tenant": name[0], "seq_id": sequence_id("t", RequestId(name))} | changes
        return self.new(name, **changes)

    async def accept(self, *names: str, limits: QueueLimits = LIMITS, **changes: Any) -> AcceptStatus:
        for name in names:
            reply = await self.store.accept(self.request(name, **changes), limits)
        return reply.status

    async def run(self, name: str) -> None:
        taken = await self.bench.take_ownership(self.request(name).seq_id, 0, W1, name, TakeReason.QUEUED)
        assert taken.epoch == 1

    async def serve(self, count: int, store: Any = None) -> str:
        """Pops and places so many, one after the other; their tenants."""
        return "".join([(await self.serve_one(store))[0] for _ in range(count)])

    async def serve_one(self, store: Any = None) -> str:
        [popped] = await (store or self.store).pop("model", 1, 1000)
        await self.run(popped.record.request_id)
        return str(popped.record.request_id)


def numbered(tenant: str, count: int) -> list[str]:
    return [f"{tenant}{number}" for number in range(count)]


async def test_a_flood_delays_others_by_a_turn(bench: Any, new: Any) -> None:
    tenants = Tenants(bench, new)
    await tenants.accept(*numbered("x", 20))
    await tenants.accept(*numbered("y", 3))
    assert await tenants.serve(8) == "xyxyxyxx"


async def test_turns_are_counted_in_tokens(bench: Any, new: Any) -> None:
    tenants = Tenants(bench, new)
    await tenants.accept(*numbered("x", 9), max_tokens=400)
    await tenants.accept(*numbered("y", 40), max_tokens=99)
    served = await tenants.serve(20)
    assert served.count("y") == 16 and served.count("x") == 4


async def test_a_class_has_a_bounded_head_start(bench: Any, new: Any) -> None:
    """Two classes are 2000 tokens here: so much of the other tenant's passes what waits, and then they take turns."""
    tenants = Tenants(bench, new)
    await tenants.accept("b0", "b1", "b2", priority=BULK)
    await tenants.accept(*numbered("i", 30), priority=INTERACTIVE)
    passed = -(-2000 // CHARGE)
    assert await tenants.serve(passed) == "i" * passed
    assert sorted(await tenants.serve(6)) == sorted("bibibi")


async def test_a_requeued_sequence_keeps_its_place(bench: Any, new: Any) -> None:
    tenants = Tenants(bench, new)
    await tenants.accept(*numbered("x", 9), *numbered("y", 9))
    first = [await tenants.serve_one() for _ in range(5)]
    for name in first:
        assert await tenants.store.requeue(tenants.request(name).seq_id, 1)
    again = [popped.record.request_id for popped in await tenants.store.pop("model", 6, 1000)]
    assert again[:5] == first and again[5] == "y2"


async def test_a_short_answer_gives_its_charge_back(bench: Any, new: Any) -> None:
    """Both tenants compute eight tokens per request, but one of them has asked for a hundred times as many."""
    tenants, served = Tenants(bench, new), ""
    waiting = {"x": 0, "y": 0}

    async def top_up(tenant: str) -> None:
        name = f"{tenant}{waiting[tenant]}"
        waiting[tenant] += 1
        await tenants.accept(name, max_tokens=800 if tenant == "x" else 8, limits=QueueLimits(max_tokens=10**8))

    for _ in range(10):
        await top_up("x")
        await top_up("y")
    for _ in range(1600):
        name = await tenants.serve_one()
        item = AppendItem(tenants.request(name).seq_id, 1, 0, 0, [7] * 8, FinishReason.LENGTH)
        await tenants.store.append_batch(W1, [item])
        served += name[0]
        await top_up(name[0])
    late = served[1000:]
    assert late.count("y") / late.count("x") < 1.2


async def test_a_tenant_has_bounds_of_its_own(bench: Any, new: Any) -> None:
    tenants = Tenants(bench, new)
    limits = QueueLimits(max_requests=9, max_tokens=10_000, tenant_requests=3, tenant_tokens=150)
    assert await tenants.accept("x0", "x1", limits=limits) is AcceptStatus.OK
    full = await tenants.store.accept(tenants.request("x2"), limits)
    assert (full.status, full.exceeded) == (AcceptStatus.FULL, QueueBound.TENANT_TOKENS)
    assert (full.queued, full.queued_of_tenant) == (QueueDepth(2, 134), QueueDepth(2, 134))
    assert await tenants.accept("y0", max_tokens=9_000, limits=limits) is AcceptStatus.OK  # one may always wait
    assert await tenants.accept("x2", max_tokens=1, limits=limits) is AcceptStatus.OK
    full = await tenants.store.accept(tenants.request("x3", max_tokens=1), limits)
    assert (full.status, full.exceeded) == (AcceptStatus.FULL, QueueBound.TENANT_REQUESTS)
    await tenants.run("x0")
    assert await tenants.accept("x3", max_tokens=1, limits=limits) is AcceptStatus.OK
    assert await tenants.accept("x4", max_tokens=1, limits=limits) is AcceptStatus.FULL


async def test_a_full_queue_tells_how_fast_it_drains(bench: Any, new: Any) -> None:
    tenants, limits = Tenants(bench, new), QueueLimits(max_requests=30)
    await tenants.accept(*numbered("x", 30), limits=limits)

    async def rate() -> int:
        full = await tenants.store.accept(tenants.request("y"), limits)
        assert (full.status, full.exceeded) == (AcceptStatus.FULL, QueueBound.REQUESTS)
        return int(full.tokens_per_s)

    assert await rate() == 0, "nothing is known"
    for number in range(20):
        await tenants.serve(1)
        await tenants.accept(f"z{number}", limits=limits)
        await bench.advance(500)
    assert 0.7 * 134 < await rate() < 1.1 * 134
    await bench.advance(60_000)
    assert await rate() < 5, "nothing has left for a minute"
    await bench.store.finish(Finish(tenants.request("z0").seq_id, FinishReason.DEADLINE))
