"""The test doubles themselves: the oracle is right, and each kind of wrong block shows."""

from collections.abc import Callable

import pytest
from scheduler_parts import SchedulerParts
from sequences import new_sequence

from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.step import StepPlan
from gpu_worker.testing.witness_runner import WitnessRunner, witness_oracle
from octavo.request.errors import OutOfBlocks
from octavo.request.ids import SequenceId
from octavo.request.sampling import SamplingParams

ROOT = b"r" * 32


def run(sabotage: Callable[[WitnessRunner, StepPlan], None] | None = None, n: int = 1) -> tuple[dict, WitnessRunner]:
    """The outputs of a small crowd that has to swap, and the runner."""
    runner = WitnessRunner(block_size=4, num_blocks=20, num_host_blocks=40)
    config = SchedulerConfig(max_batch_tokens=32, max_batch_sequences=8, preemption="swap", min_preempt_interval_s=0)
    scheduler = SchedulerParts(config, runner.info).scheduler
    for number in range(6):
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=24, n=n)
        scheduler.admit(new_sequence(str(number), [number, 2, 3, 4, 5], params, root=ROOT))
    outputs: dict[tuple[str, int], list[int]] = {}
    while scheduler.has_work:
        plan = scheduler.plan()
        if sabotage:
            sabotage(runner, plan)
        for item in scheduler.commit(plan, runner.run(plan.input)).items:
            outputs.setdefault((item.seq_id, item.branch), []).extend(item.token_ids)
    return outputs, runner


def oracle(n: int = 1) -> dict:
    info = WitnessRunner(block_size=4, num_blocks=20, num_host_blocks=40).info
    return {
        (str(number), branch): witness_oracle(
            [number, 2, 3, 4, 5],
            ROOT,
            24,
            info=info,
            params=SamplingParams(temperature=1.0, seed=number, max_tokens=24, n=n),
            branch=branch,
        )
        for number in range(6)
        for branch in range(n)
    }


@pytest.mark.parametrize("n", [1, 2])
def test_the_oracle_says_what_the_runner_computes(n: int) -> None:
    outputs, runner = run(n=n)
    assert outputs == oracle(n)
    assert not runner.mismatches


def lose_swaps_out(runner: WitnessRunner, plan: StepPlan) -> None:
    plan.input.swap_out.clear()


def lose_swaps_in(runner: WitnessRunner, plan: StepPlan) -> None:
    plan.input.swap_in.clear()


def lose_copies(runner: WitnessRunner, plan: StepPlan) -> None:
    plan.input.copies.clear()


def write_a_foreign_block(runner: WitnessRunner, plan: StepPlan) -> None:
    if plan.input.step_id == 6:
        mine = plan.chunks[0].branch
        foreign = next(c.branch for c in plan.chunks if c.branch.sequence is not mine.sequence)
        runner._arena[mine.blocks[0]] = runner._arena[foreign.blocks[0]]


def change_one_slot(runner: WitnessRunner, plan: StepPlan) -> None:
    if plan.input.step_id == 6:
        runner._arena[plan.chunks[0].branch.blocks[0], 1, 1, 0] += 1


@pytest.mark.parametrize(
    "sabotage", [lose_swaps_out, lose_swaps_in, lose_copies, write_a_foreign_block, change_one_slot]
)
def test_sabotage_shows_in_the_output(sabotage: Callable[[WitnessRunner, StepPlan], None]) -> None:
    outputs, runner = run(sabotage, n=2)
    assert outputs != oracle(2)
    assert runner.mismatches
    assert "is not what was written" in runner.first_mismatch


def test_greedy_branches_are_equal_and_roots_are_not() -> None:
    info = WitnessRunner().info
    greedy = SamplingParams(temperature=0.0)
    first = witness_oracle([1, 2], ROOT, 20, info=info, params=greedy, branch=0)
    assert first == witness_oracle([1, 2], ROOT, 20, info=info, params=greedy, branch=1)
    assert first != witness_oracle([1, 2], b"s" * 32, 20, info=info, params=greedy)
    assert 0 not in first


@pytest.mark.parametrize("meddle", ["out again", "cancel", "drop"])
def test_blocks_on_their_way_in_are_left_alone_or_forgotten(meddle: str) -> None:
    runner = WitnessRunner(block_size=4, num_blocks=8, num_host_blocks=8)
    config = SchedulerConfig(
        max_batch_tokens=64, max_batch_sequences=4, watermark=0.0, prefix_caching=False, debug=True
    )
    parts = SchedulerParts(config, runner.info)
    scheduler = parts.scheduler
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs: dict[str, list[int]] = {}

    def admit(name: str, prompt: list[int]) -> None:
        assert scheduler.admit(new_sequence(name, prompt, params, root=ROOT)).admitted

    def step() -> None:
        plan = scheduler.plan()
        assert len({to for _, to in plan.input.swap_in}) == len(plan.input.swap_in)
        for item in scheduler.commit(plan, runner.run(plan.input)).items:
            outputs.setdefault(item.seq_id, []).extend(item.token_ids)

    admit("a", [1, 2, 3, 4, 5, 6])
    step()
    scheduler.swap(SequenceId("a"), 1, "out")
    step()
    assert scheduler.swap(SequenceId("a"), 1, "in") == 2
    if meddle == "out again":
        with pytest.raises(OutOfBlocks):
            scheduler.swap(SequenceId("a"), 1, "out")
    elif meddle == "cancel":
        scheduler.cancel(parts.sequence("a"))
    else:
        scheduler.swap(SequenceId("a"), 1, "drop")
    admit("b", list(range(10, 30)))
    while scheduler.has_work:
        step()
    assert not runner.mismatches, runner.first_mismatch
    assert outputs["b"] == witness_oracle(list(range(10, 30)), ROOT, 12, info=runner.info)
    if meddle != "cancel":
        assert outputs["a"] == witness_oracle([1, 2, 3, 4, 5, 6], ROOT, 12, info=runner.info)
