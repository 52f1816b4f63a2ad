"""The order of the queue: tenants in turn, classes with a head start, and charges that follow what was computed."""

import itertools
from collections.abc import Callable
from typing import Any

from octavo.request.ids import Incarnation, RequestId, sequence_id
from octavo.request.record import NewSequence
from octavo.request.sampling import FinishReason
from octavo.store.calls import AcceptStatus, AppendItem, Finish, QueueBound, QueueDepth, QueueLimits, TakeReason

W1 = Incarnation("worker1")
LIMITS = QueueLimits(max_requests=1000, max_tokens=64_000)  # a head start of 1000 tokens
SYSTEM, INTERACTIVE, DEFAULT, BULK = 1, 2, 3, 4
CHARGE = 131  # of a sequence of `new`: 3 tokens of prompt, and twice 64 of output
MIN_FLOWS = 64  # so many accounts are not swept
BURSTS = 16  # of a head start
BURST_OF_4 = QueueLimits(max_requests=1000, max_tokens=64 * BURSTS * 4 * CHARGE)
New = Callable[..., NewSequence]


class Tenants:
    """Sequences that are named after their tenant: "x1" is one of tenant x."""

    def __init__(self, bench: Any, new: New) -> None:
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


async def test_a_tenant_that_floods_the_queue_delays_another_by_its_turn_only(bench: Any, new: New) -> None:
    tenants = Tenants(bench, new)
    await tenants.accept(*numbered("x", 20))
    await tenants.accept(*numbered("y", 3))
    assert await tenants.serve(8) == "xyxyxyxx"


async def test_turns_are_counted_in_tokens(bench: Any, new: New) -> None:
    tenants = Tenants(bench, new)
    await tenants.accept(*numbered("x", 9), max_tokens=400)
    await tenants.accept(*numbered("y", 40), max_tokens=99)
    served = await tenants.serve(20)
    assert served.count("y") == 16 and served.count("x") == 4


async def test_the_order_is_right_whichever_router_accepts_and_pops(bench: Any, new: New) -> None:
    tenants, other = Tenants(bench, new), bench.another()
    await tenants.accept(*numbered("x", 6))
    elsewhere = Tenants(bench, new)
    elsewhere.store = other
    await elsewhere.accept(*numbered("y", 6))
    assert "".join([await tenants.serve(1, store) for store in (other, tenants.store) * 4]) == "xyxyxyxy"


async def test_a_tenant_that_was_idle_begins_where_the_busy_ones_are(bench: Any, new: New) -> None:
    """It has no claim to the turns that it did not take while it was away, except for a burst."""
    tenants, one_charge = Tenants(bench, new), QueueLimits(max_requests=1000, max_tokens=64 * BURSTS * CHARGE)
    await tenants.accept(*numbered("x", 30), limits=one_charge)
    assert await tenants.serve(10) == "x" * 10
    await tenants.accept(*numbered("y", 10), limits=one_charge)
    assert await tenants.serve(9) == "yyxyxyxyx"


async def test_a_burst_of_a_tenant_that_was_idle_comes_before_the_busy_ones(bench: Any, new: New) -> None:
    tenants = Tenants(bench, new)
    await tenants.accept(*numbered("x", 30), limits=BURST_OF_4)
    assert await tenants.serve(20) == "x" * 20
    await tenants.accept(*numbered("y", 10), limits=BURST_OF_4)
    assert await tenants.serve(8) == "yyyyyxyx"


class TenantsWithPlaces(Tenants):
    """Tenant x always has sequences that wait, and tenant y has one now and then."""

    def __init__(self, bench: Any, new: New) -> None:
        super().__init__(bench, new)
        self.numbers = itertools.count()

    async def send(self, tenant: str, count: int = 1) -> None:
        await self.accept(*(f"{tenant}{next(self.numbers)}" for _ in range(count)), limits=BURST_OF_4)

    async def pop(self, places: int, most_kept: int, count: int = 1) -> str:
        """The tenants of what is popped, and placed."""
        popped = await self.store.pop("model", count, 1000, places, most_kept)
        for each in popped:
            await self.run(each.record.request_id)
        return "".join(each.record.tenant for each in popped)

    async def begin(self, num_rounds: int) -> None:
        """So many rounds in which two sequences of x start and then one of y, which is under its share."""
        await self.send("x", 20)
        await self.pop(99, 0, 10)
        for _ in range(num_rounds):
            await self.send("x", 2)
            await self.pop(99, 0, 2)
            await self.send("y")
            assert await self.pop(99, 0) == "y"


async def test_the_last_places_are_kept_for_tenants_that_had_less_than_their_share(bench: Any, new: New) -> None:
    tenants = TenantsWithPlaces(bench, new)
    await tenants.begin(20)  # a fifth of about 64 starts were of y, so that two of 10 places are kept
    assert [await tenants.pop(places, 9) for places in (1, 2)] == ["", ""]
    assert await tenants.pop(3, 9) == "x"
    assert await tenants.pop(6, 9, 6) == "xxxx", "all but two places"
    assert await tenants.pop(2, 1) == "x", "one place is the most that may be kept"
    await tenants.send("y")
    assert await tenants.pop(1, 9) == "y"
    assert await tenants.pop(1, 0) == "x"


async def test_no_place_is_kept_for_tenants_that_send_nothing_any_more(bench: Any, new: New) -> None:
    tenants = TenantsWithPlaces(bench, new)
    await tenants.begin(20)
    assert await tenants.pop(1, 9) == ""
    await tenants.send("x", 200)
    assert await tenants.pop(999, 0, 200) == "x" * 200
    assert await tenants.pop(1, 9) == "x"


async def test_no_place_is_kept_while_one_tenant_is_alone(bench: Any, new: New) -> None:
    tenants = TenantsWithPlaces(bench, new)
    for _ in range(40):  # its first sequences of each round are below the virtual time
        await tenants.send("x", 8)
        assert await tenants.pop(1, 9, 9) == "x" * 8


async def test_no_place_is_kept_from_equal_tenants_that_all_wait(bench: Any, new: New) -> None:
    tenants = TenantsWithPlaces(bench, new)
    for _ in range(8):
        await tenants.send("x")
        await tenants.send("y")
    for number in range(70):  # the first sequences of both were under their share
        assert sorted(await tenants.pop(2, 9 if number > 30 else 0, 2)) == ["x", "y"]
        await tenants.send("x")
        await tenants.send("y")


async def test_what_had_an_owner_is_not_held_back(bench: Any, new: New) -> None:
    tenants = TenantsWithPlaces(bench, new)
    await tenants.begin(20)
    [popped] = await tenants.store.pop("model", 1, 1000, 9, 9)
    await tenants.run(popped.record.request_id)
    assert await tenants.store.requeue(popped.record.seq_id, 1)
    again = await tenants.store.pop("model", 2, 1000, 1, 9)
    assert [each.record.request_id for each in again] == [popped.record.request_id]


async def test_tenants_that_come_once_do_not_change_the_shares_of_those_that_stay(bench: Any, new: New) -> None:
    tenants, served = Tenants(bench, new), ""
    await tenants.accept(*numbered("x", 90), *numbered("y", 90))
    for number in range(150):
        await tenants.accept(f"z{number}", tenant=f"once{number}")
        served += await tenants.serve(2)
    assert served.count("z") >= 149
    assert abs(served.count("x") - served.count("y")) <= 1
    assert await bench.num_accounts("model") <= 2 * MIN_FLOWS


async def test_those_who_wait_alone_are_served_as_they_came(bench: Any, new: New) -> None:
    tenants, names = Tenants(bench, new), "gcfabed"
    await tenants.accept(*(f"{name}0" for name in names))
    assert await tenants.serve(len(names)) == names


async def test_a_class_has_a_head_start_and_no_more(bench: Any, new: New) -> None:
    """Two classes are 2000 tokens here: so much of the other tenant's passes what waits, and then they take turns."""
    tenants = Tenants(bench, new)
    await tenants.accept("b0", "b1", "b2", priority=BULK)
    await tenants.accept(*numbered("i", 30), priority=INTERACTIVE)
    passed = -(-2000 // CHARGE)
    assert await tenants.serve(passed) == "i" * passed
    assert sorted(await tenants.serve(6)) == sorted("bibibi")


async def test_a_tenant_s_bulk_work_does_not_delay_its_interactive_work(bench: Any, new: New) -> None:
    tenants = Tenants(bench, new)
    await tenants.accept(*numbered("x", 20), priority=BULK)
    await tenants.accept("xi", priority=INTERACTIVE)
    await tenants.accept("xs", priority=SYSTEM)
    assert [await tenants.serve_one() for _ in range(3)] == ["xs", "xi", "x0"]


async def test_what_goes_back_into_the_queue_keeps_its_place(bench: Any, new: New) -> None:
    tenants = Tenants(bench, new)
    await tenants.accept(*numbered("x", 9), *numbered("y", 9))
    first = [await tenants.serve_one() for _ in range(5)]
    for name in first:
        assert await tenants.store.requeue(tenants.request(name).seq_id, 1)
    again = [popped.record.request_id for popped in await tenants.store.pop("model", 6, 1000)]
    assert again[:5] == first and again[5] == "y2"


async def test_a_short_answer_gives_back_what_it_was_charged_for(bench: Any, new: New) -> None:
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


async def test_what_was_cancelled_while_it_waited_is_not_charged(bench: Any, new: New) -> None:
    tenants = Tenants(bench, new)
    await tenants.accept(*numbered("y", 30))
    await tenants.accept(*numbered("x", 20))
    for name in numbered("x", 20):
        await tenants.store.cancel(tenants.request(name).seq_id)
    await tenants.accept("xx")
    assert "x" in await tenants.serve(3)


async def test_a_tenant_has_bounds_of_its_own(bench: Any, new: New) -> None:
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


async def test_a_full_queue_tells_how_fast_it_drains(bench: Any, new: New) -> None:
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
