"""A real (tiny) model: a sequence that moves between two arenas gets the tokens that it would have had."""

from dataclasses import replace

import pytest
import torch
from effort import diagonal, some
from instruction_sets import OPS
from migration_benches import KINDS, MigrationBench, move
from tiny_llama import CPU, PROMPTS, Form, tiny_llama

from gpu_worker.ops import choose_ops

torch.set_num_threads(1)
FORM = Form(block_size=16)


def new_bench() -> MigrationBench:
    return MigrationBench(runner=tiny_llama(FORM, choose_ops(CPU)).runner, max_batch_tokens=64)


def moved_often(kind: str, every: int) -> tuple[MigrationBench, MigrationBench]:
    """A bench on which a sequence ran, and one where it has ended that moved between two after every so many steps."""
    params = replace(KINDS[kind], max_tokens=50, logprobs=1)
    whole, source, target = (new_bench() for _ in range(3))
    for bench in (whole, source):
        bench.admit("a", PROMPTS[3], params)
    whole.finish()
    source.run_steps(2)
    while True:
        move(source, target, "a")
        plan, _ = target.step()
        assert plan.num_tokens == params.num_branches, "nothing is computed again"
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
@pytest.mark.parametrize("every", some([3, 5, 7], [3, 7]))
@pytest.mark.parametrize(("kind", "on_ops"), diagonal(["greedy", "seeded", "penalties", "n"], OPS), indirect=["on_ops"])
def test_the_scores_of_one_that_moves_often_are_the_same_bit_for_bit(kind: str, every: int) -> None:
    """With the reference ops, whose sums for a piece of a prompt differ, it fails if the tails are computed again."""
    whole, moved = moved_often(kind, every)
    assert moved.tokens == whole.tokens
    assert moved.scores == whole.scores
