"""Vectors of prompts, whatever runs beside them: the same bits, and an end for every one of them."""

import random
from array import array

import pytest
from scheduler_parts import SchedulerParts
from sequences import new_sequence

from gpu_worker.pooling.pooled_sequences import pooled_sequence
from gpu_worker.pooling.vectors import vector_of
from gpu_worker.scheduling.state.pooling import PoolingEnd
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.steps.runner import StepOutput
from gpu_worker.testing.fake_runner import FakeRunner, mix, state_vector
from gpu_worker.testing.witness_runner import WitnessContext, WitnessRunner, salt_of
from octavo.pooling.params import PoolingParams, PoolKind, logits_of
from octavo.request import hashing
from octavo.request.errors import BadLogits, Cancelled, DeadlineExceeded, InvalidArgument, RunnerFailed
from octavo.request.sampling import FinishReason, SamplingParams

KINDS = [PoolingParams(), PoolingParams(PoolKind.MEAN), PoolingParams(PoolKind.MEAN, dimensions=5), logits_of((3, 9))]


def expected(runner: WitnessRunner, prompt: list[int], params: PoolingParams) -> array:
    """What the witness's states come to, computed without blocks and steps."""
    info = runner.info
    root = hashing.root_key(info.fingerprint, info.layout, salt="", numerics=info.numerics)
    context, states = WitnessContext(info.window, salt_of(root)), []
    for token in prompt:
        context.append(token)
        states.append(context.state)
    if params.kind is PoolKind.LOGITS:
        return array("f", (mix(states[-1], token) % 4096 / 256 for token in params.token_ids))
    if params.kind is PoolKind.LAST:
        return vector_of(PoolingEnd(array("f", state_vector(states[-1]))), params, len(prompt))
    total = [sum(column) for column in zip(*map(state_vector, states), strict=True)]
    return vector_of(PoolingEnd(array("d", total)), params, len(prompt))


@pytest.mark.parametrize("seed", range(12))
def test_neighbours_cuts_and_preemption_change_no_vector(seed: int) -> None:
    rng = random.Random(seed)
    runner = WitnessRunner(num_blocks=rng.choice([14, 24, 200]), num_host_blocks=rng.choice([0, 16]), block_size=4)
    config = SchedulerConfig(
        max_batch_tokens=rng.choice([8, 16, 64]),
        max_batch_sequences=8,
        chunked_prefill=rng.random() < 0.8,
        prefix_caching=rng.random() < 0.8,
        preemption=rng.choice(["auto", "swap", "recompute"]),
        policy=rng.choice(["fcfs", "priority"]),
        min_preempt_interval_s=0.0,
        debug=True,
    )
    scheduler = SchedulerParts(config, runner.info).scheduler
    shared = [rng.randrange(900) for _ in range(30)]
    ends: dict[int, PoolingEnd] = {}
    asked, given_up = {}, set()
    for step in range(4000):
        if len(asked) < 40 and rng.random() < 0.4:
            number = len(asked)
            prompt = shared[: rng.randrange(30)] + [rng.randrange(900) for _ in range(rng.randrange(1, 12))]
            asked[number] = prompt, rng.choice(KINDS)
            sequence = pooled_sequence(
                *asked[number],
                runner.info,
                lambda end, number=number: ends.update({number: end}),
                priority=rng.randint(1, 4),
            )
            assert scheduler.admit(sequence).admitted
            if rng.random() < 0.1:
                given_up.add(number)
                scheduler.drop(sequence) if rng.random() < 0.5 else scheduler.cancel(sequence)
        if step < 60 and rng.random() < 0.3:
            params = SamplingParams(temperature=0, seed=1, max_tokens=rng.randrange(1, 20), ignore_eos=True)
            scheduler.admit(new_sequence(f"{step:032x}", shared[: rng.randrange(1, 20)], params))
        plan = scheduler.plan()
        scheduler.commit(plan, runner.run(plan.input) if not plan.input.empty else StepOutput([]))
        if len(asked) == 40 and len(ends) == 40:
            break
    assert len(ends) == 40
    assert not runner.mismatches, runner.first_mismatch
    for number, (prompt, params) in asked.items():
        failure = ends[number].failure
        if number in given_up:
            assert failure is not None and failure.reason == Cancelled.reason
        else:
            assert failure is None, failure
            assert vector_of(ends[number], params, len(prompt)) == expected(runner, prompt, params)


def test_a_mean_needs_every_row_and_the_last_token_none_that_is_cached() -> None:
    runner = WitnessRunner(block_size=4)
    prompt = list(range(100, 123))
    parts = SchedulerParts(SchedulerConfig(max_batch_tokens=64, max_batch_sequences=8, debug=True), runner.info)
    cached = []
    for params in (PoolingParams(), PoolingParams(), PoolingParams(PoolKind.MEAN)):
        scheduler = parts.scheduler
        assert scheduler.admit(pooled_sequence(prompt, params, runner.info, cached.append)).admitted
        plan = scheduler.plan()
        scheduler.commit(plan, runner.run(plan.input))
    assert [end.cached_tokens for end in cached] == [0, 20, 0]
    assert not scheduler.has_work


def test_what_ends_a_prompt_early_reaches_who_waits() -> None:
    clock = [0.0]
    runner = FakeRunner(block_size=4, num_blocks=8)
    config = SchedulerConfig(max_batch_tokens=8, max_batch_sequences=8, debug=True)
    scheduler, ends = SchedulerParts(config, runner.info, lambda: clock[0]).scheduler, []

    def ask(length: int = 20) -> object:
        sequence = pooled_sequence(range(1, length + 1), PoolingParams(), runner.info, ends.append)
        return sequence, scheduler.admit(sequence).admitted

    def run(plan) -> str:
        scheduler.commit(plan, runner.run(plan.input))
        assert len(ends) == 1, "told once"
        return ends.pop().failure.reason

    sequence, _ = ask()
    sequence.deadline = 1.0
    scheduler._watch_deadline(sequence, 1.0)
    clock[0] = 2.0
    assert run(scheduler.plan()) == DeadlineExceeded.reason
    sequence, _ = ask()
    plan = scheduler.plan()
    scheduler.cancel(sequence, FinishReason.CANCELLED)  # while the step runs
    assert not ends
    assert run(plan) == Cancelled.reason
    ask()
    for _ in range(2):
        scheduler.abort_step(scheduler.plan(), RunnerFailed("broken").failure())
    assert ends.pop().failure.reason == RunnerFailed.reason
    assert not ask(length=40)[1] and not ends, "more than all blocks"
    assert not scheduler.has_work


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([], PoolingParams()),
        ([1000], PoolingParams()),
        (range(8192), PoolingParams()),
        ([1], PoolingParams(dimensions=17)),
        ([1], PoolingParams(token_ids=(1,))),
        ([1], logits_of((1000,))),
    ],
)
def test_no_bad_prompt_reaches_the_scheduler(prompt, params):
    with pytest.raises(InvalidArgument):
        pooled_sequence(prompt, params, FakeRunner().info, lambda end: None)


def test_a_state_that_is_not_finite_is_an_error() -> None:
    with pytest.raises(BadLogits):
        vector_of(PoolingEnd(array("f", [1.0, float("nan")])), PoolingParams(), 3)
    assert vector_of(PoolingEnd(array("f", [0.0, 0.0])), PoolingParams(), 3).tolist() == [0.0, 0.0]
    cut = vector_of(PoolingEnd(array("f", [3.0, 4.0, 9.0])), PoolingParams(dimensions=2), 1)
    assert cut.tolist() == pytest.approx([0.6, 0.8])
