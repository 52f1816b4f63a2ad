"""Blocks go to the host pool ahead of their eviction and come back, beside steps, where that is worth it."""

from dataclasses import replace

import pytest
from scheduler_bench import Bench

SMALL = {"num_blocks": 24, "num_host_blocks": 96}


def prompt(number: int, length: int = 33) -> list[int]:
    return [number, *(1 + index % 90 for index in range(length - 1))]


def bench_with_a_demoted_prompt(**options) -> Bench:
    """Prompt 1 was computed, demoted and evicted."""
    bench = Bench(runner=SMALL, **options)
    for number in (1, 2, 3, 4):
        bench.admit(f"s{number}", prompt(number))
        bench.finish()
    return bench


def test_an_evicted_prefix_comes_back_by_a_copy_and_changes_no_output() -> None:
    bench = bench_with_a_demoted_prompt()
    again = bench.admit("again", prompt(1))
    plan, _ = bench.step()
    assert len(plan.swap_in) == 8 and not plan.chunks, "no step waits for the copies"
    bench.step()
    assert bench.lengths == {"again": 1}
    bench.finish()
    assert again.cached_tokens == 32
    assert bench.tokens["again.0"] == bench.tokens["s1.0"]


def test_others_run_on_while_a_prefix_comes_back() -> None:
    bench = bench_with_a_demoted_prompt()
    bench.admit("other", 3)
    bench.step()
    bench.admit("again", prompt(1))
    plan, _ = bench.step()
    assert plan.swap_in and bench.lengths == {"other": 1}
    bench.finish()
    assert bench.tokens["again.0"] == bench.tokens["s1.0"]


def test_a_prefix_that_two_want_comes_back_once() -> None:
    bench = bench_with_a_demoted_prompt()
    one, two = bench.admit("one", [*prompt(1), 5]), bench.admit("two", [*prompt(1), 6])
    num_copied = 0
    while bench.scheduler.has_work:
        num_copied += len(bench.step()[0].swap_in)
    assert num_copied == 8
    assert one.cached_tokens == two.cached_tokens == 32


def test_what_the_device_has_is_shared_and_only_the_rest_is_copied() -> None:
    bench = bench_with_a_demoted_prompt()
    bench.admit("first", prompt(1, 17))
    bench.finish()
    bench.admit("again", prompt(1))
    plan, _ = bench.step()
    assert len(plan.swap_in) == 4


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
            assert not plan.demotions and not plan.swap_in
    assert bench.tokens["s14.0"] == bench.tokens["s10.0"]


def test_copies_that_have_become_slow_are_not_made() -> None:
    bench = bench_with_a_demoted_prompt()
    bench.costs.copy_bytes_per_s = 1.0
    again = bench.admit("again", prompt(1))
    bench.finish()
    assert again.cached_tokens == 0 and bench.tokens["again.0"] == bench.tokens["s1.0"]


def test_a_step_demotes_no_more_than_it_takes() -> None:
    bench = Bench(runner={"num_blocks": 64, "num_host_blocks": 64})
    for number in range(1, 8):
        bench.admit(f"s{number}", prompt(number, 28))
        while bench.scheduler.has_work:
            plan, _ = bench.step()
            assert len(plan.demotions) <= -(-plan.num_tokens // 4)
    assert bench.workload.tables.tier.num_demoted > 0


def test_nothing_is_demoted_while_copies_are_under_way() -> None:
    bench = Bench(runner={"num_blocks": 64, "num_host_blocks": 64})
    run, busy = bench.runner.run, True
    bench.runner.run = lambda plan: replace(run(plan), is_copying=busy)
    for number in range(1, 12):
        bench.admit(f"s{number}", prompt(number, 28))
        bench.finish()
    assert bench.workload.tables.tier.num_demoted == 0, "blocks were dropped"
    busy = False
    bench.admit("last", prompt(12, 28))
    bench.finish()
    assert bench.workload.tables.tier.num_demoted > 0


def test_no_block_is_demoted_while_free_ones_suffice() -> None:
    bench = Bench(runner={"num_blocks": 400, "num_host_blocks": 64})
    for number in range(1, 8):
        bench.admit(f"s{number}", prompt(number))
    while bench.scheduler.has_work:
        assert not bench.step()[0].demotions


def test_a_failed_step_leaves_no_copy_that_was_perhaps_not_made() -> None:
    bench = bench_with_a_demoted_prompt()
    tier = bench.workload.tables.tier
    bench.admit("next", prompt(7))
    before = dict(bench.workload.tables.cache.on_host)
    plan = bench.scheduler.plan()
    assert plan.demotions and tier.num_demoted == len(before) + len(plan.demotions)
    bench.scheduler.abort_step(plan, "{}")
    assert dict(bench.workload.tables.cache.on_host) == before
    bench.finish()
    assert len(bench.tokens["next.0"]) == 8


def test_a_failed_step_takes_back_the_blocks_that_were_perhaps_not_promoted() -> None:
    bench = bench_with_a_demoted_prompt()
    again = bench.admit("again", prompt(1))
    plan = bench.scheduler.plan()
    assert plan.swap_in and not plan.chunks and again.branches[0].num_computed == 32
    bench.scheduler.abort_step(plan, "{}")
    assert again.branches[0].num_computed == 0 and not again.branches[0].blocks
    plan, _ = bench.step()
    assert len(plan.swap_in) == 8, "the copies in the host pool are still there"
    bench.finish()
    assert bench.tokens["again.0"] == bench.tokens["s1.0"]


def test_a_swapped_out_sequence_takes_the_place_of_demoted_blocks() -> None:
    bench = Bench(runner={"num_blocks": 24, "num_host_blocks": 10})
    for number in (1, 2, 3, 4):
        bench.admit(f"s{number}", prompt(number))
        bench.finish()
    tier = bench.workload.tables.tier
    assert tier.num_demoted == 10 and bench.load().num_free_host_blocks == 10
    bench.admit("long", prompt(5))
    bench.step()
    bench.step()
    assert bench.scheduler.swap(bench.sequence("long").seq_id, 1, "out") > 0
    assert tier.num_demoted < 10
    bench.scheduler.check_state()
    assert bench.scheduler.swap(bench.sequence("long").seq_id, 1, "in") > 0
    bench.finish()
    assert len(bench.tokens["long.0"]) == 8


def test_a_working_set_of_four_devices_is_mostly_copied() -> None:

    def computed(host_tier: bool) -> int:
        bench = Bench(runner={"num_blocks": 40, "num_host_blocks": 200}, host_tier=host_tier)
        total = 0
        for number in range(120):
            bench.admit(f"r{number}", [*prompt(1 + number * 7 % 20), 1 + number % 50])
            while bench.scheduler.has_work:
                plan, _ = bench.step()
                total += plan.num_tokens - plan.num_decodes
        return total

    assert computed(True) <= 0.4 * computed(False)
