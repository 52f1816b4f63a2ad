"""What a scheduler learns from the steps it planned."""

import pytest
from scheduler_parts import SchedulerParts
from sequences import new_sequence

from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.step import StepPlan
from gpu_worker.steps.runner import StepOutput
from gpu_worker.testing.fake_runner import FakeRunner
from octavo.request.sampling import SamplingParams

BLOCK = 16
TOKENS_PER_S = 4000.0


class Bench(SchedulerParts):
    """Steps that take as long as is said."""

    def __init__(self) -> None:
        self.runner = FakeRunner(block_size=BLOCK, num_blocks=4096, context_tokens=20_000)
        config = SchedulerConfig(max_batch_tokens=2048, step_s=0.25, max_batch_sequences=64)
        super().__init__(config, self.runner.info)

    def admit(self, number: int, prompt: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
        tokens = [1 + (number + place * place) % 97 for place in range(prompt)]
        assert self.scheduler.admit(new_sequence(f"{number:032x}", tokens, params)).admitted

    def plan(self) -> tuple[StepPlan, StepOutput]:
        plan = self.scheduler.plan()
        return plan, self.runner.run(plan.input)

    def step(self, fixed_s: float = 0.0) -> tuple[int, int]:
        """How many tokens of decodes and of prompts it had."""
        plan, output = self.plan()
        self.times.observe_costs(plan, output, fixed_s + plan.num_tokens / TOKENS_PER_S)
        self.scheduler.commit(plan, output)
        return plan.num_decodes, plan.num_tokens - plan.num_decodes


def test_steps_that_are_decodes_for_the_most_part_say_nothing_of_the_speed_of_prompts() -> None:
    bench = Bench()
    for number in range(40):
        bench.admit(number, 5)
    for _ in range(3):
        bench.step()
    rate = bench.times.prefill_tokens_per_s
    bench.admit(1000, 30)
    assert bench.step(fixed_s=1.0) == (40, 30)
    assert bench.times.prefill_tokens_per_s == rate
    bench.admit(1001, 100)
    assert bench.step(fixed_s=1.0) == (41, 100)
    assert bench.times.prefill_tokens_per_s < rate


@pytest.mark.parametrize(("copy_s", "learns"), [(0.0, False), (0.5, True)])
def test_a_step_that_waited_for_copies_nobody_timed_says_nothing_of_prompts(copy_s: float, learns: bool) -> None:
    bench = Bench()
    bench.admit(1, 100)
    plan, output = bench.plan()
    plan.input.swap_in.append((0, 4000))
    output.copy_s = copy_s
    bench.times.observe_costs(plan, output, 0.6)
    assert bool(bench.times.prefill_tokens_per_s) == learns


def test_demotions_that_a_step_waited_for_count_as_copies_and_others_as_nothing() -> None:
    bench = Bench()
    bench.admit(1, 100)
    plan, output = bench.plan()
    plan.input.demotions += [(0, 0), (1, 1)]
    before = bench.costs.copy_bytes_per_s
    bench.times.observe_costs(plan, output, 0.5)
    assert bench.costs.copy_bytes_per_s == before
    assert bench.times.prefill_tokens_per_s == pytest.approx(plan.num_tokens / 0.5)
    output.demote_s = 0.25
    bench.times.observe_costs(plan, output, 0.5)
    assert bench.costs.copy_bytes_per_s < before
    assert bench.times.prefill_tokens_per_s > plan.num_tokens / 0.5
