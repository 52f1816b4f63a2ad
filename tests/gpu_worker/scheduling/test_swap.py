"""Swaps on request: a sequence stays out until it is asked for, and goes on with the tokens it would have had."""

from dataclasses import replace

import pytest
from migration_benches import KINDS, MigrationBench
from scheduler_bench import GREEDY

from octavo.request.errors import InvalidArgument, NotFound, OutOfBlocks, StaleEpoch
from octavo.request.sampling import SamplingParams

LONG = replace(GREEDY, max_tokens=20)
BEAMS = SamplingParams(n=2, beam_width=3, temperature=0.0, max_tokens=20)


def swap(bench: MigrationBench, name: str, operation: str) -> int:
    """With its copies made at once, as the engine makes them."""
    num_blocks = bench.scheduler.swap(bench.sequence(name).seq_id, 1, operation)
    plan = bench.scheduler.plan_moves()
    if plan is not None:
        assert not plan.chunks and plan.input.timed
        bench.runner.run(plan.input)
        bench.scheduler.end_moves(plan)
    bench.scheduler.check_state()
    return num_blocks


@pytest.mark.parametrize("kind", ["best_of", "beams"])
def test_a_sequence_stays_out_until_it_is_asked_for_and_has_the_same_tokens(kind: str) -> None:
    """Also while its prompt is computed, whose blocks another sequence shares. The random world swaps at any time."""
    params = BEAMS if kind == "beams" else KINDS[kind]
    for num_steps in (1, 9):
        bench, alone = MigrationBench(), MigrationBench()
        for each in (bench, alone):
            each.admit("a", 70, params)
        bench.admit("b", bench.sequence("a").prompt[:50] + [9] * 9, LONG)
        bench.run_steps(num_steps)
        assert swap(bench, "a", "out") > 0 == swap(bench, "a", "out")
        assert not any(branch.blocks for branch in bench.sequence("a").branches)
        told = sum(len(tokens) for name, tokens in bench.tokens.items() if name[0] == "a")
        bench.now += 1e6
        bench.finish()
        assert "b.0" in bench.finishes
        assert told == sum(len(tokens) for name, tokens in bench.tokens.items() if name[0] == "a"), "it ran while out"
        assert swap(bench, "a", "in") > 0 == swap(bench, "a", "in")
        bench.finish()
        alone.finish()
        assert {name: tokens for name, tokens in bench.tokens.items() if name[0] == "a"} == alone.tokens
        assert not bench.runner.mismatches, bench.runner.first_mismatch


def test_a_swap_that_cannot_be_is_an_answer() -> None:
    bench = MigrationBench(sizes={"num_host_blocks": 2})
    bench.admit("a", 12, LONG)
    bench.step()
    with pytest.raises(OutOfBlocks, match=r"2 of 2 blocks are free there; try again, or DROP"):
        swap(bench, "a", "out")
    for name, epoch, error in (("z", 1, NotFound), ("a", 2, StaleEpoch)):
        with pytest.raises(error):
            bench.scheduler.swap(name, epoch, "out")
    bench.finish()
    assert len(bench.tokens["a.0"]) == 20


def test_a_suspect_is_not_held_because_others_wait_for_it() -> None:
    bench = MigrationBench()
    suspect = bench.admit("suspect", 12, LONG, suspect=True)
    bench.admit("a")
    bench.scheduler.reserve_steps(suspect)
    bench.scheduler.begin_trial(suspect)
    bench.run_steps(2)
    with pytest.raises(InvalidArgument, match="operation: sequence suspect is a suspect"):
        swap(bench, "suspect", "out")
    assert swap(bench, "suspect", "drop") > 0
    bench.run_steps(2)
    bench.scheduler.end_trial(suspect)
    assert swap(bench, "suspect", "out") > 0
    bench.finish()
    assert list(bench.finishes) == ["a.0"]


def test_copies_that_fail_cost_no_token() -> None:
    bench = MigrationBench()
    bench.admit("a", 12, LONG)
    bench.run_steps(3)
    bench.scheduler.swap(bench.sequence("a").seq_id, 1, "out")
    plan = bench.scheduler.plan_moves()
    with pytest.raises(RuntimeError, match="between steps"):
        bench.scheduler.plan_moves()
    bench.scheduler.end_moves(plan, failed=True)
    with pytest.raises(RuntimeError, match="not in flight"):
        bench.scheduler.end_moves(plan)
    bench.finish()
    assert len(bench.tokens["a.0"]) == 20 and not bench.runner.mismatches
