"""What a step holds: budgets of tokens and prompts, decodes first, who runs alone."""

from dataclasses import replace

import pytest
from scheduler_bench import GREEDY, Bench

from octavo.request.sampling import FinishReason


def test_a_long_prompt_starves_nobody_and_is_not_starved() -> None:
    bench = Bench(runner={"num_blocks": 600, "context_tokens": 4096}, max_batch_tokens=32)
    bench.admit("long", 1600)
    first_tokens: dict[str, int] = {}
    for step in range(400):
        if step % 3 == 0 and step < 60:
            bench.admit(f"short{step}", 10, replace(GREEDY, max_tokens=3))
        plan, result = bench.step()
        assert plan.num_tokens <= 32
        if "long.0" not in bench.tokens and "long" not in bench.lengths:
            raise AssertionError("the long prompt stood still")
        for item in result.items:
            first_tokens.setdefault(item.seq_id, step)
        if not bench.scheduler.has_work:
            break
    for name, step in first_tokens.items():
        if name.startswith("short"):
            assert step - int(name.removeprefix("short")) <= 3
    assert first_tokens["long"] <= 1600 / (32 / 4) + 1


def test_only_so_many_prompts_are_under_way() -> None:
    bench = Bench(runner={"num_blocks": 200}, max_partial_prefills=3, max_long_partial_prefills=2)
    for number in range(6):
        bench.admit(f"s{number}", 100)
    seen, most = set(), 0
    for _ in range(25):
        plan = bench.scheduler.plan()
        seen |= {chunk.branch.sequence.seq_id for chunk in plan.chunks}
        bench.scheduler.commit(plan, bench.runner.run(plan.input))
        left = [len(branch.tokens) - branch.num_computed for branch in bench.workload.lists.prefilling]
        assert len(left) <= 3
        assert sum(num_tokens > 32 for num_tokens in left) <= 2
        most = max(most, len(left))
    assert most >= 2 and len(seen) == 6


def test_unchunked_prompts_run_whole_and_never_beside_decodes() -> None:
    bench = Bench(chunked_prefill=False, max_batch_tokens=24)
    sizes = {"a": 20, "b": 8, "c": 12, "d": 23}
    for name, size in sizes.items():
        bench.admit(name, size, replace(GREEDY, max_tokens=4))
    prefilled = {}
    while bench.scheduler.has_work:
        plan, _ = bench.step()
        fresh = {chunk.branch.sequence.seq_id: chunk.length for chunk in plan.chunks[plan.num_decodes :]}
        assert not (fresh and plan.num_decodes)
        prefilled.update(fresh)
    assert prefilled == sizes
    bench.admit("e", 60)  # longer than a step: it has to be split even so
    bench.finish()
    assert len(bench.tokens["e.0"]) == 8


def names_in(bench: Bench) -> set[str]:
    """Who is in the next step."""
    plan, _ = bench.step()
    return {chunk.branch.sequence.seq_id for chunk in plan.chunks}


@pytest.mark.parametrize("how", ["ends", "is cancelled", "is dropped", "was never begun"])
def test_a_suspect_runs_alone_and_others_pause_until_the_end_of_the_trial_is_told(how: str) -> None:
    """The store may hold the suspect for running until it has heard of its end."""
    bench = Bench()
    for name in "ab":
        bench.admit(name, params=replace(GREEDY, max_tokens=40))
    suspect = bench.admit("x", params=replace(GREEDY, max_tokens=2), suspect=True)
    assert names_in(bench) == {"a", "b"}, "before its trial it does not run"
    bench.scheduler.reserve_steps(suspect)
    assert names_in(bench) == set(), "nobody runs while it is announced"
    if how == "is cancelled" or how == "is dropped":
        bench.step()
        (bench.cancel if how == "is cancelled" else bench.drop)("x")
    if how != "was never begun":
        bench.scheduler.begin_trial(suspect)
    assert all(names_in(bench) <= {"x"} for _ in range(10))
    assert bench.scheduler.is_here(suspect) == (how == "was never begun")
    assert bench.scheduler.has_work
    bench.scheduler.end_trial(suspect)
    assert names_in(bench) >= {"a", "b"}
    bench.finish()
    assert not bench.workload.suspects


def test_steps_are_reserved_for_those_alone_that_are_here() -> None:
    bench = Bench()
    bench.admit("a")
    suspect, other = bench.admit("x", suspect=True), bench.admit("y", suspect=True)
    bench.drop("x")
    assert not bench.scheduler.reserve_steps(suspect)
    assert names_in(bench) == {"a"}
    assert bench.scheduler.reserve_steps(other)
    bench.scheduler.end_trial(suspect)  # says nothing of another's trial
    assert not bench.scheduler.begin_trial(suspect)
    assert names_in(bench) == set()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_a_suspect_gets_room_from_others_that_cannot_go_on(preemption: str) -> None:
    """They pause with their blocks, with half a prompt, or with the beginning of the suspect's own prompt."""
    sizes = {"num_blocks": 16, "num_host_blocks": 16}
    bench = Bench(runner=sizes, preemption=preemption, max_batch_tokens=16, max_partial_prefills=1)
    long, prompt = replace(GREEDY, max_tokens=16), [1 + number % 50 for number in range(40)]
    bench.admit("a", 5, long, priority=1)
    bench.step()
    bench.admit("b", prompt, long, priority=1)
    suspect = bench.admit("x", prompt, long, priority=4, suspect=True)
    bench.step()
    bench.scheduler.reserve_steps(suspect)
    bench.scheduler.begin_trial(suspect)
    assert all(names_in(bench) <= {"x"} for _ in range(24))
    assert bench.finishes == {"x.0": FinishReason.LENGTH}
    bench.scheduler.end_trial(suspect)
    bench.finish()
    assert bench.finishes == dict.fromkeys(("a.0", "b.0", "x.0"), FinishReason.LENGTH)
    assert bench.tokens["x.0"] == bench.tokens["b.0"]


def test_the_watermark_is_left_free_by_sequences_that_start_beside_others() -> None:
    def started(watermark: float) -> tuple[set[str], int]:
        bench = Bench(runner={"num_blocks": 20}, watermark=watermark, max_batch_tokens=64)
        for name in ("a", "b", "c"):
            bench.admit(name, 4 * 5 - 1)  # five blocks each, the next token included
        bench.step()
        return set(bench.lengths), bench.load().num_free_blocks

    assert started(0.0) == ({"a", "b", "c"}, 5)
    assert started(0.5) == ({"a", "b"}, 10)
    assert started(0.99) == ({"a"}, 15)
    bench = Bench(runner={"num_blocks": 20}, watermark=0.99, max_batch_tokens=128)
    bench.admit("alone", 4 * 19)
    assert bench.step()[0].num_tokens == 4 * 19, "alone, a sequence may have all blocks"
