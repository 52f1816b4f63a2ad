"""The test doubles themselves: the oracle is right, and each kind of wrong block shows."""

from collections.abc import Callable

import pytest
from scheduler_parts import SchedulerParts
from sequences import new_sequence

from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.step import StepPlan
from gpu_worker.testing.witness_runner import WitnessRunner, witness_oracle
from octavo.request.sampling import SamplingParams

ROOT = b"r" * 32


def params_of(number: int, n: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=number, max_tokens=24, n=n)


def run(sabotage: Callable[[WitnessRunner, StepPlan], None] | None = None, n: int = 1) -> tuple[dict, WitnessRunner]:
    """The outputs of a small crowd that has to swap, and the runner."""
    runner = WitnessRunner(block_size=4, num_blocks=20, num_host_blocks=40)
    config = SchedulerConfig(max_batch_tokens=32, max_batch_sequences=8, preemption="swap", min_preempt_interval_s=0)
    scheduler = SchedulerParts(config, runner.info).scheduler
    for number in range(6):
        scheduler.admit(new_sequence(str(number), [number, 2, 3, 4, 5], params_of(number, n), root=ROOT))
    outputs: dict[tuple[str, int], list[int]] = {}
    while scheduler.has_work:
        plan = scheduler.plan()
        if sabotage:
            sabotage(runner, plan)
        for item in scheduler.commit(plan, runner.run(plan.input)).items:
            outputs.setdefault((item.seq_id, item.branch), []).extend(item.token_ids)
    return outputs, runner


def oracle(n: int = 1) -> dict:
    info, found = WitnessRunner(block_size=4, num_blocks=20, num_host_blocks=40).info, {}
    for number in range(6):
        options = {"info": info, "params": params_of(number, n)}
        for branch in range(n):
            tokens = witness_oracle([number, 2, 3, 4, 5], ROOT, 24, **options, branch=branch)
            found[str(number), branch] = tokens
    return found


@pytest.mark.parametrize("n", [1, 2])
def test_the_oracle_says_what_the_runner_computes(n: int) -> None:
    outputs, runner = run(n=n)
    assert outputs == oracle(n)
    assert not runner.mismatches


def write_a_foreign_block(runner: WitnessRunner, plan: StepPlan) -> None:
    if plan.input.step_id == 6:
        mine = plan.chunks[0].branch
        foreign = next(c.branch for c in plan.chunks if c.branch.sequence is not mine.sequence)
        runner._arena[mine.blocks[0]] = runner._arena[foreign.blocks[0]]


def change_one_slot(runner: WitnessRunner, plan: StepPlan) -> None:
    if plan.input.step_id == 6:
        runner._arena[plan.chunks[0].branch.blocks[0], 1, 1, 0] += 1


SABOTAGES = [
    lambda runner, plan: plan.input.swap_out.clear(),
    lambda runner, plan: plan.input.swap_in.clear(),
    lambda runner, plan: plan.input.copies.clear(),
    *(write_a_foreign_block, change_one_slot),
]


@pytest.mark.parametrize("sabotage", SABOTAGES)
def test_sabotage_shows_in_the_output(sabotage: Callable[[WitnessRunner, StepPlan], None]) -> None:
    outputs, runner = run(sabotage, n=2)
    assert outputs != oracle(2)
    assert runner.mismatches
    assert "is not what was written" in runner.first_mismatch
