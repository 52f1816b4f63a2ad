"""The budget of a step follows the measured rate."""

import random

import pytest

from gpu_worker.scheduling.state.scheduler_config import START_TOKENS, SchedulerConfig, StepBudget

BLOCK = 16


def budget(step_s: float = 0.25, **config) -> StepBudget:
    return StepBudget(SchedulerConfig(**{"max_batch_tokens": 2048, "step_s": step_s, **config}), BLOCK)


def run(budget: StepBudget, tokens_per_s: float, steps: int = 20, fixed_s: float = 0.0) -> float:
    """Steps that are full of prompts; how long the last one takes."""
    seconds = 0.0
    for _ in range(steps):
        seconds = fixed_s + budget.tokens / tokens_per_s
        budget.observe(budget.tokens, seconds)
    return seconds


@pytest.mark.parametrize("rate", [5, 200, 1000, 5000, 8000, 1e6])
def test_a_step_takes_as_long_as_wanted(rate: float) -> None:
    """A slow model gets a block, and a fast one all there is."""
    following = budget()
    assert following.tokens == START_TOKENS
    run(following, rate)
    assert following.tokens == pytest.approx(min(max(0.25 * rate, BLOCK), 2048), rel=0.35)  # whole blocks
    assert following.tokens % BLOCK == 0


@pytest.mark.parametrize("rate", [1000, 4000])
def test_what_every_step_costs_does_not_keep_the_budget_small(rate: float) -> None:
    """The rate of small steps is then far below that of large ones."""
    following = budget()
    run(following, 5)
    assert following.tokens == BLOCK
    seconds = run(following, rate, steps=40, fixed_s=0.15)
    assert 0.8 * 0.25 <= seconds <= 0.25 + BLOCK / rate
    before = following.tokens
    following.observe(before * 2 // 3, 0.15 + before * 2 / 3 / rate)  # quick, and not full
    assert following.tokens >= before


def test_decodes_never_shut_prompts_out_where_the_budget_follows() -> None:
    following = budget()
    run(following, 5)
    assert following.for_prompts(0) == following.for_prompts(200) == BLOCK
    assert following.for_prompts(2040) == 8  # nor is a step larger than it may be
    assert budget().for_prompts(56) == 200


def test_without_a_time_the_budget_is_constant() -> None:
    fixed = budget(step_s=0.0, max_batch_tokens=100, max_batch_sequences=100)
    fixed.observe(100, 9.0)
    assert (fixed.tokens, fixed.for_prompts(30), fixed.for_prompts(100)) == (100, 70, 0)


def test_any_measurements_leave_it_within_its_bounds() -> None:
    rng = random.Random(0)
    following = budget(max_batch_tokens=1000)
    for _ in range(3000):
        following.observe(rng.randrange(1, 2000), 10 ** rng.uniform(-5, 3))
        assert BLOCK <= following.tokens <= 1000
