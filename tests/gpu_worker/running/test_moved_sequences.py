"""A real (tiny) model: a sequence that moves between two arenas gets the tokens that it would have had."""

from dataclasses import replace

import pytest
import torch
from effort import diagonal
from instruction_sets import OPS
from migration_benches import KINDS, MigrationBench, move
from tiny_llama import CPU, PROMPTS, Form, tiny_llama

from gpu_worker.ops import choose_ops
from octavo.request.sampling import SamplingParams

torch.set_num_threads(1)
FORM = Form()
LONG = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


def new_bench(form: Form = FORM) -> MigrationBench:
    return MigrationBench(runner=tiny_llama(form, choose_ops(CPU)).runner, max_batch_tokens=64)


@pytest.mark.usefixtures("on_ops")
@pytest.mark.parametrize(("kind", "on_ops"), diagonal(list(KINDS), OPS), indirect=["on_ops"])
def test_a_moved_sequence_goes_on_with_the_same_tokens(kind: str) -> None:
    params, prompt = KINDS[kind], PROMPTS[3]
    whole, source, target = new_bench(), new_bench(), new_bench()
    whole.admit("a", prompt, params)
    whole.finish()
    source.admit("a", prompt, params)
    source.run_steps(7)
    target.admit("beside", PROMPTS[5], LONG)
    target.step()
    held = move(source, target, "a", [lambda: source.run_steps(3)])
    plan, _ = target.step()
    assert len(held.wanted) >= len(prompt) // FORM.block_size
    assert plan.num_tokens == 1 + params.num_branches, "nothing is computed again"
    target.finish()
    assert any(target.tokens[f"a.{branch}"] for branch in range(params.num_branches))
    for branch in range(params.num_branches):
        key = f"a.{branch}"
        assert source.tokens[key] + target.tokens[key] == whole.tokens[key]
        scores = source.scores[key] + target.scores[key]
        assert [score.token_id for score in scores] == [score.token_id for score in whole.scores[key]]
        expected = [score.logprob for score in whole.scores[key]]
        assert [score.logprob for score in scores] == pytest.approx(expected, abs=1e-3)
        assert target.totals[key] == (whole.totals[key] and pytest.approx(whole.totals[key], abs=1e-2))


def moved_often(
    kind: str, every: int, *, form: Form = FORM, with_tails: bool = True
) -> tuple[MigrationBench, MigrationBench]:
    """A bench on which a sequence ran, and one where it has ended that moved between two after every so many steps."""
    params = replace(KINDS[kind], max_tokens=50, logprobs=1)
    whole, source, target = new_bench(form), new_bench(form), new_bench(form)
    for bench in (whole, source):
        bench.admit("a", PROMPTS[3], params)
    whole.finish()
    source.run_steps(2)
    while True:
        move(source, target, "a", with_tails=with_tails)
        plan, _ = target.step()
        assert not with_tails or plan.num_tokens == params.num_branches, "nothing is computed again"
        for _ in range(every - 1):
            if target.scheduler.has_work:
                target.step()
        for key, tokens in source.tokens.items():
            target.tokens[key] = tokens + target.tokens[key]
            target.scores[key] = source.scores[key] + target.scores[key]
        source.tokens, source.scores = {}, {}
        if not target.scheduler.has_work:
            return whole, target
        source, target = target, source


@pytest.mark.usefixtures("on_ops")
@pytest.mark.parametrize("every", [3, 5, 7])
@pytest.mark.parametrize(("kind", "on_ops"), diagonal(["greedy", "seeded", "penalties", "n"], OPS), indirect=["on_ops"])
def test_the_scores_of_one_that_moves_often_are_the_same_bit_for_bit(kind: str, every: int) -> None:
    """With the reference ops, whose sums for a piece of a prompt differ, it fails if the tails are computed again."""
    whole, moved = moved_often(kind, every, form=replace(FORM, block_size=16))
    assert moved.tokens == whole.tokens
    assert moved.scores == whole.scores


def test_a_block_that_is_another_changes_the_tokens() -> None:
    """So the blocks that arrive are what the next tokens are made of."""
    whole, source, target = new_bench(), new_bench(), new_bench()
    for bench in (whole, source):
        bench.admit("a", PROMPTS[3], LONG)
    whole.finish()
    source.run_steps(7)
    for layer in source.runner.layers:
        layer[source.sequence("a").branches[0].blocks[1]] *= -1
    move(source, target, "a")
    target.finish()
    assert source.tokens["a.0"] + target.tokens["a.0"] != whole.tokens["a.0"]
