"""How long steps take, as measured: load reports say it, and the cost model and the step budget learn from it."""

from collections import deque
from statistics import median

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.scheduling.step import StepOutput, StepPlan
from gpu_worker.scheduling.step_budget import StepBudget

NUM_RECENT = 31
MIN_PREFILL_TOKENS = 32  # a step with fewer tokens of prompts says little about how fast prompts are
WEIGHT = 0.2  # of a new measurement of the prefill rate against all earlier ones


class StepTimes:
    """Counts and rates of steps, which the engine's thread writes and any thread reads."""

    def __init__(self, costs: CostModel, budget: StepBudget, bytes_per_block: int) -> None:
        self._costs = costs
        self._budget = budget
        self._bytes_per_block = bytes_per_block
        self.num_steps = 0
        self.prefill_tokens_per_s = 0.0  # 0: not known yet
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    def count_step(self, step_s: float, num_tokens: int) -> None:
        """Counts a step that took `step_s` in all: planning, running and committing it."""
        self.num_steps += 1
        if num_tokens:
            self._recent.append(step_s)

    def observe_costs(self, plan: StepPlan, output: StepOutput, run_s: float) -> None:
        """Gives the cost model and the step budget what running a plan has measured.

        A step whose swaps were timed measures what copying costs. A step with tokens of prompts, whose copies (if any)
        were timed, measures what computing costs.
        """
        num_copied = len(plan.swap_out) + len(plan.swap_in)
        if num_copied and output.copy_s:
            self._costs.observe_copy(num_copied * self._bytes_per_block, output.copy_s)
        num_prefill = plan.num_tokens - plan.num_decodes
        compute_s = run_s - output.copy_s
        if num_prefill <= 0 or compute_s <= 0 or (num_copied and not output.copy_s):
            return  # a step with copies that were not timed may have waited for them
        self._budget.observe(plan.num_tokens, compute_s)  # of every such step, or a low budget would stay low
        if num_prefill >= max(MIN_PREFILL_TOKENS, plan.num_decodes):
            self._costs.observe_prefill(plan.num_tokens, compute_s)
            rate = plan.num_tokens / compute_s
            weight = WEIGHT if self.prefill_tokens_per_s else 1.0
            self.prefill_tokens_per_s += weight * (rate - self.prefill_tokens_per_s)

    @property
    def step_s(self) -> float:
        """The median of the last steps that ran anything."""
        recent = list(self._recent)
        return median(recent) if recent else 0.0
