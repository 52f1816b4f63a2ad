"""The order of the queue: tenants in turn, classes with a head start, and charges that follow what was computed."""

import pytest

from octavo.store.calls import QueueBound, QueueDepth, QueueLimits

INTERACTIVE, BULK = 2, 4
CHARGE = 131  # of a sequence of `new`: 3 tokens of prompt, and twice 64 of output


def numbered(tenant, count):
    return [f"{tenant}{number}" for number in range(count)]


async def test_tenants_take_turns_and_a_requeued_sequence_keeps_its_place(tenants):
    await tenants.accepted(*numbered("x", 20), *numbered("y", 9))
    first = await tenants.serve(5)
    assert first == ["x0", "y0", "x1", "y1", "x2"]
    for name in first:
        assert await tenants.store.requeue(tenants.id(name), 1)
    again = [popped.record.request_id for popped in await tenants.store.pop("model", 6, 1000)]
    assert again == [*first, "y2"]


async def test_turns_are_counted_in_tokens(tenants):
    await tenants.accepted(*numbered("x", 9), max_tokens=400)
    await tenants.accepted(*numbered("y", 40), max_tokens=99)
    assert sum(name[0] == "y" for name in await tenants.serve(20)) == 16


async def test_a_class_has_a_bounded_head_start(tenants):
    """Two classes are 2000 tokens here: so much of the other tenant's passes what waits, and then they take turns."""
    await tenants.accepted("b0", "b1", "b2", priority=BULK)
    await tenants.accepted(*numbered("i", 30), priority=INTERACTIVE)
    passed = -(-2000 // CHARGE)
    served = [name[0] for name in await tenants.serve(passed + 6)]
    assert served[:passed] == ["i"] * passed
    assert sorted(served[passed:]) == sorted("bibibi")


@pytest.mark.parametrize("store_url", [""])  # a server does the same: test_long_queues.py
async def test_a_short_answer_gives_its_charge_back(tenants):
    """Both tenants compute eight tokens per request, but one of them has asked for a hundred times as many."""
    served, num_asked = [], {"x": 10, "y": 10}

    async def ask(tenant, *numbers):
        wanted = 800 if tenant == "x" else 8
        names = [f"{tenant}{number}" for number in numbers]
        await tenants.accepted(*names, max_tokens=wanted, limits=QueueLimits(max_tokens=10**8))

    await ask("x", *range(10))
    await ask("y", *range(10))
    for _ in range(1600):
        [popped] = await tenants.store.pop("model", 1, 1000)
        name = str(popped.record.request_id)
        await tenants.run(name, 8)
        served.append(name[0])
        await ask(name[0], num_asked[name[0]])
        num_asked[name[0]] += 1
    late = served[1000:]
    assert late.count("y") / late.count("x") < 1.2


async def test_the_queue_and_each_tenant_have_bounds(tenants):
    limits = QueueLimits(max_requests=9, max_tokens=10_000, tenant_requests=3, tenant_tokens=150)
    await tenants.accepted("x0", "x1", limits=limits)
    full = await tenants.refused("x2", QueueBound.TENANT_TOKENS, limits=limits)
    assert (full.queued, full.queued_of_tenant) == (QueueDepth(2, 134), QueueDepth(2, 134))
    await tenants.accepted("y0", max_tokens=9_000, limits=limits)  # one may always wait
    await tenants.refused("z0", QueueBound.TOKENS, max_tokens=1_000, limits=limits)
    await tenants.accepted("x2", max_tokens=1, limits=limits)
    await tenants.refused("x3", QueueBound.TENANT_REQUESTS, max_tokens=1, limits=limits)
    await tenants.run("x0")
    await tenants.accepted("x3", max_tokens=1, limits=limits)
    await tenants.refused("x4", QueueBound.TENANT_REQUESTS, max_tokens=1, limits=limits)


async def test_a_full_queue_tells_how_fast_it_drains(bench, tenants):
    limits = QueueLimits(max_requests=30)
    await tenants.accepted(*numbered("x", 30), limits=limits)

    async def rate():
        return (await tenants.refused("y", QueueBound.REQUESTS, limits=limits)).tokens_per_s

    assert await rate() == 0, "nothing is known"
    for number in range(20):
        await tenants.serve(1)
        await tenants.accepted(f"z{number}", limits=limits)
        await bench.advance(500)
    assert 0.7 * 134 < await rate() < 1.1 * 134
    await bench.advance(60_000)
    assert await rate() < 5, "nothing has left for a minute"
