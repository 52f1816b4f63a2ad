"""Blocks go to the host pool ahead of their eviction and come back, beside steps, where that is worth it."""

from dataclasses import replace

import pytest
from scheduler_bench import Bench

SMALL = {"num_blocks": 24, "num_host_blocks": 96}


def prompt(number: int, length: int = 33) -> list[int]:
    return [number, *(1 + index % 90 for index in range(length - 1))]


def test_an_evicted_prefix_comes_back_by_a_copy_and_changes_no_output() -> None:
    bench = Bench(runner=SMALL)
    for number in (1, 2, 3, 4):  # the first is demoted and evicted
        bench.admit(f"s{number}", prompt(number))
        bench.finish()
    again = bench.admit("again", prompt(1))
    plan, _ = bench.step()
    assert len(plan.input.swap_in) == 8 and not plan.chunks, "no step waits for the copies"
    bench.step()
    assert bench.lengths == {"again": 1}
    bench.finish()
    assert again.cached_tokens == 32
    assert bench.tokens["again.0"] == bench.tokens["s1.0"]


@pytest.mark.parametrize(
    ("options", "copy_bytes_per_s"), [({"host_tier": False}, 4e9), ({"prefix_caching": False}, 4e9), ({}, 1.0)]
)
def test_blocks_are_computed_where_the_tier_is_off_or_copies_are_slower(options: dict, copy_bytes_per_s: float) -> None:
    bench = Bench(runner=SMALL, **options)
    bench.costs.copy_bytes_per_s = copy_bytes_per_s
    for number in (1, 2, 3, 4, 1):
        bench.admit(f"s{number}{len(bench.tokens)}", prompt(number))
        while bench.scheduler.has_work:
            plan, _ = bench.step()
            assert not plan.input.demotions and not plan.input.swap_in
    assert bench.tokens["s14.0"] == bench.tokens["s10.0"]


@pytest.mark.parametrize("busy", [False, True])
def test_a_step_demotes_no_more_than_it_takes_and_nothing_while_copies_are_under_way(busy: bool) -> None:
    bench = Bench(runner={"num_blocks": 64, "num_host_blocks": 64})
    run = bench.runner.run
    bench.runner.run = lambda step: replace(run(step), is_copying=busy)
    for number in range(1, 12):
        bench.admit(f"s{number}", prompt(number, 28))
        while bench.scheduler.has_work:
            plan, _ = bench.step()
            assert len(plan.input.demotions) <= -(-plan.num_tokens // 4)
    assert (bench.workload.tables.tier.num_demoted > 0) != busy
