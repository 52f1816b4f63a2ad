"""Swaps on request: a sequence stays out until it is asked for, and goes on with the tokens it would have had."""

from dataclasses import replace

import pytest
from scheduler_bench import GREEDY, Bench

from gpu_worker.testing.witness_runner import WitnessRunner
from octavo.request.errors import InvalidArgument, NotFound, OutOfBlocks, StaleEpoch
from octavo.request.sampling import SamplingParams

SIZES = {"block_size": 4, "num_blocks": 64, "num_host_blocks": 48}
LONG = replace(GREEDY, max_tokens=20)
KINDS = {
    "one branch": LONG,
    "n": SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20),
    "best_of": SamplingParams(n=2, best_of=4, temperature=1.0, seed=6, max_tokens=20),
    "beams": SamplingParams(n=2, beam_width=3, temperature=0.0, max_tokens=20),
    "penalties": replace(LONG, repetition_penalty=1.2, logprobs=2),
}


class SwapBench(Bench):
    """A scheduler whose runner reads its blocks, with swaps whose copies are made at once, as the engine makes them."""

    def __init__(self, *, sizes: dict | None = None, **config) -> None:
        super().__init__(runner=WitnessRunner(**SIZES | (sizes or {})), **config)

    def swap(self, name: str, operation: str) -> int:
        num_blocks = self.scheduler.swap(self.sequence(name).seq_id, 1, operation)
        plan = self.scheduler.plan_moves()
        if plan is not None:
            assert not plan.chunks and plan.input.timed
            self.runner.run(plan.input)
            self.scheduler.end_moves(plan)
        self.scheduler.check_state()
        return num_blocks

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def num_blocks_of(self, name: str) -> int:
        return len({block for branch in self.sequence(name).branches for block in branch.blocks})

    def empty(self) -> bool:
        load = self.load()
        return not load.num_used_blocks and load.num_free_host_blocks == self.runner.info.num_host_blocks


def undisturbed(params: SamplingParams, prompt: int) -> dict[str, list[int]]:
    bench = SwapBench()
    bench.admit("a", prompt, params)
    bench.finish()
    return bench.tokens


@pytest.mark.parametrize("operation", ["out", "drop"])
@pytest.mark.parametrize("num_steps", [1, 2, 3, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_a_sequence_goes_on_with_the_same_tokens(kind: str, num_steps: int, operation: str) -> None:
    """Also while its prompt of three chunks is computed, and while another sequence shares its prefix."""
    params, bench = KINDS[kind], SwapBench()
    bench.admit("a", 70, params)
    bench.admit("b", bench.sequence("a").prompt[:50] + [9] * 9, LONG)
    bench.run_steps(num_steps)
    held = bench.num_blocks_of("a")
    assert 0 < bench.swap("a", operation) <= held
    assert not bench.num_blocks_of("a")
    if operation == "out":
        told = {name: tokens[:] for name, tokens in bench.tokens.items() if name[0] == "a"}
        assert bench.swap("a", "out") == 0
        bench.now += 1e6
        bench.finish()
        assert "b.0" in bench.finishes
        assert told == {name: tokens for name, tokens in bench.tokens.items() if name[0] == "a"}, "it ran while out"
        assert bench.swap("a", "in") > 0 == bench.swap("a", "in")
    bench.finish()
    assert {name: tokens for name, tokens in bench.tokens.items() if name[0] == "a"} == undisturbed(params, 70)
    assert not bench.runner.mismatches, bench.runner.first_mismatch
    assert bench.empty()


def test_a_swap_that_cannot_be_is_an_answer() -> None:
    bench = SwapBench(sizes={"num_host_blocks": 2})
    bench.admit("a", 12, LONG)
    bench.step()
    with pytest.raises(OutOfBlocks, match=r"2 of 2 blocks are free there; try again, or DROP"):
        bench.swap("a", "out")
    with pytest.raises(NotFound):
        bench.scheduler.swap("z", 1, "out")
    with pytest.raises(StaleEpoch):
        bench.scheduler.swap("a", 2, "out")
    bench.finish()
    assert len(bench.tokens["a.0"]) == 20


def test_a_suspect_is_not_held_because_others_wait_for_it() -> None:
    bench = SwapBench()
    suspect = bench.admit("suspect", 12, LONG, suspect=True)
    bench.admit("a")
    bench.scheduler.reserve_steps(suspect)
    bench.scheduler.begin_trial(suspect)
    bench.run_steps(2)
    with pytest.raises(InvalidArgument, match="operation: sequence suspect is a suspect"):
        bench.swap("suspect", "out")
    assert bench.swap("suspect", "drop") > 0
    bench.run_steps(2)
    bench.scheduler.end_trial(suspect)
    assert bench.swap("suspect", "out") > 0
    bench.finish()
    assert list(bench.finishes) == ["a.0"]


def test_copies_that_fail_cost_no_token() -> None:
    bench = SwapBench()
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
