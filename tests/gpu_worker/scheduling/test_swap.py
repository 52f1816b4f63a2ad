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


def tokens_of_a(bench: MigrationBench) -> dict[str, list[int]]:
    return {name: tokens[:] for name, tokens in bench.tokens.items() if name[0] == "a"}


def undisturbed(params: SamplingParams, prompt: int) -> dict[str, list[int]]:
    bench = MigrationBench()
    bench.admit("a", prompt, params)
    bench.finish()
    return bench.tokens


@pytest.mark.parametrize("operation", ["out", "drop"])
@pytest.mark.parametrize("num_steps", [1, 3, 9])
@pytest.mark.parametrize("kind", ["greedy", "best_of", "penalties", "beams"])
def test_a_sequence_goes_on_with_the_same_tokens(kind: str, num_steps: int, operation: str) -> None:
    """Also while its prompt of three chunks is computed, and while another sequence shares its prefix."""
    params, bench = BEAMS if kind == "beams" else KINDS[kind], MigrationBench()
    bench.admit("a", 70, params)
    bench.admit("b", bench.sequence("a").prompt[:50] + [9] * 9, LONG)
    bench.run_steps(num_steps)
    held = {block for branch in bench.sequence("a").branches for block in branch.blocks}
    assert 0 < swap(bench, "a", operation) <= len(held)
    assert not any(branch.blocks for branch in bench.sequence("a").branches)
    if operation == "out":
        told = tokens_of_a(bench)
        assert swap(bench, "a", "out") == 0
        bench.now += 1e6
        bench.finish()
        assert "b.0" in bench.finishes and told == tokens_of_a(bench), "it ran while out"
        assert swap(bench, "a", "in") > 0 == swap(bench, "a", "in")
    bench.finish()
    assert tokens_of_a(bench) == undisturbed(params, 70)
    assert not bench.runner.mismatches, bench.runner.first_mismatch
    assert (bench.load().num_used_blocks, bench.load().num_free_host_blocks) == (0, 48)


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
    assert bench.tokens == undisturbed(LONG, 12)
