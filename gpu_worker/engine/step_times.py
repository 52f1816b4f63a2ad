"""How long steps take, as measured: what load reports say, and what the cost model and the step budget go by."""

from collections import deque
from statistics import median

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.scheduling.step import StepOutput, StepPlan
from gpu_worker.scheduling.step_budget import StepBudget

NUM_RECENT = 31
MIN_PREFILL_TOKENS = 32  # a step with fewer tokens of prompts says little about how fast prompts are
WEIGHT = 0.2  # of a new measurement of the prefill rate against all earlier ones


class StepTimes:
    """Sums and rates of steps, which the engine's thread writes and any thread reads."""

    def __init__(self, costs: CostModel, budget: StepBudget, bytes_per_block: int) -> None:
        self._costs = costs
        self._budget = budget
        self._bytes_per_block = bytes_per_block
        self.plan_s = 0.0  # sums over all steps
        self.run_s = 0.0
        self.commit_s = 0.0
        self.num_steps = 0
        self.num_tokens = 0
        self.prefill_tokens_per_s = 0.0  # 0: not known yet
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    def add(self, plan_s: float, run_s: float, commit_s: float, num_tokens: int) -> None:
        """Counts a step and its time."""
        self.plan_s += plan_s
        self.run_s += run_s
        self.commit_s += commit_s
        self.num_steps += 1
        self.num_tokens += num_tokens
        if num_tokens:
            self._recent.append(plan_s + run_s + commit_s)

    def observe(self, plan: StepPlan, output: StepOutput, run_s: float) -> None:
        """Teaches the cost model and the budget what computing and copying cost, if the step shows it."""
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
