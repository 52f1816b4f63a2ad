"""What a queue promises to those who wait, as a cell on a simulated clock measures it."""

import statistics
from dataclasses import replace

import pytest
from effort import some
from queue_model import LIMITS, Cell, Load, Outcome, capacity

from octavo.store.calls import QueueLimits


def ttft_p99(outcomes):
    return Outcome(ttfts=[t for name, each in outcomes.items() if name != "flood" for t in each.ttfts]).ttft(0.99)


@pytest.mark.parametrize("num_routers", some([1, 4], [4]))
async def test_a_flood_raises_ttft_by_half_at_most(num_routers):
    others = [Load(f"t{i}", per_s=0.1 * capacity()) for i in range(4)]
    alone = await Cell(num_routers, 1, LIMITS).play(others, 60, 20)
    flood = Load("flood", per_s=5 * capacity(), retries=False)
    beside = await Cell(num_routers, 1, replace(LIMITS, tenant_requests=16)).play([*others, flood], 60, 20)
    assert ttft_p99(beside) <= 1.5 * ttft_p99(alone)
    assert sum(each.tokens for each in beside.values()) > 1.9 * sum(each.tokens for each in alone.values())


@pytest.mark.parametrize("num_routers", some([1, 4], [4]))
async def test_equal_tenants_get_equal_numbers_of_tokens(num_routers):
    loads = [Load(f"t{i}", at_once=32 + 16 * (i % 3)) for i in range(4)]
    outcomes = await Cell(num_routers, 1, QueueLimits()).play(loads, 60, 60)
    tokens = [each.tokens for each in outcomes.values()]
    assert max(abs(each - statistics.mean(tokens)) for each in tokens) <= 0.1 * statistics.mean(tokens)
