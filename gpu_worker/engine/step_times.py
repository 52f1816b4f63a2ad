"""How long steps take, as measured: load reports say it, and the cost model and the step budget learn from it."""

from collections import OrderedDict, deque
from statistics import median

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.scheduling.state.scheduler_config import StepBudget
from gpu_worker.scheduling.state.step import StepPlan
from gpu_worker.steps.runner import StepOutput
from octavo.metrics.table import BATCH_BOUNDS, STEP_BOUNDS
from octavo.metrics.value import Histogram
from octavo.request.ids import SequenceId

NUM_RECENT = 31
MIN_PREFILL_TOKENS = 32  # a step with fewer tokens of prompts says little about how fast prompts are
MAX_STARTS = 4096  # sequences whose first step is remembered until they bring a token
WEIGHT = 0.2  # of a new measurement of the prefill rate against all earlier ones


class StepTimes:
    """Counts and rates of steps, which the engine's thread writes and any thread reads."""

    def __init__(self, costs: CostModel, budget: StepBudget, bytes_per_block: int) -> None:
        self._costs = costs
        self._budget = budget
        self._bytes_per_block = bytes_per_block
        self.num_steps = 0
        self.num_failed = 0  # steps in which the runner raised an error
        self.num_tokens = 0
        self.plan_s = self.run_s = self.commit_s = 0.0
        self.step_lengths = Histogram(STEP_BOUNDS)  # in seconds, of steps that ran anything
        self.batch_sizes = Histogram(BATCH_BOUNDS)  # in branches
        self.prefill_tokens_per_s = 0.0  # 0: not known yet
        self._starts: OrderedDict[tuple[SequenceId, int], float] = OrderedDict()  # by sequence and epoch
        self._recent: deque[float] = deque(maxlen=NUM_RECENT)

    def count_step(self, plan_s: float, run_s: float, commit_s: float, num_tokens: int, num_branches: int) -> None:
        """Counts a step, and how long it took to plan, to run and to commit it."""
        self.num_steps += 1
        self.plan_s += plan_s
        self.run_s += run_s
        self.commit_s += commit_s
        if num_tokens:
            step_s = plan_s + run_s + commit_s
            self.num_tokens += num_tokens
            self.step_lengths.observe(step_s)
            self.batch_sizes.observe(num_branches)
            self._recent.append(step_s)

    def note_prefills(self, plan: StepPlan, now: float) -> None:
        """A step begins now. Remembers of its sequences that compute prompts when their first step was."""
        for chunk in plan.chunks[plan.num_decodes + plan.num_drafted :]:
            sequence = chunk.branch.sequence
            self._starts.setdefault((sequence.seq_id, sequence.epoch), now)
        while len(self._starts) > MAX_STARTS:
            self._starts.popitem(last=False)

    def forget_start(self, seq_id: SequenceId, epoch: int) -> float | None:
        """When the first step of the sequence began, by the clock of `note_prefills`. None if it is not known any more.

        Any thread may call this.
        """
        return self._starts.pop((seq_id, epoch), None)

    def observe_costs(self, plan: StepPlan, output: StepOutput, run_s: float) -> None:
        """Gives the cost model and the step budget what running a plan has measured.

        A step whose swaps were timed measures what copying costs. A step with tokens of prompts, whose copies (if any)
        were timed, measures what computing costs.
        """
        num_copied = len(plan.input.swap_out) + len(plan.input.swap_in)
        if num_copied and output.copy_s:
            self._costs.observe_copy(num_copied * self._bytes_per_block, output.copy_s)
        if plan.input.demotions and output.demote_s:
            self._costs.observe_copy(len(plan.input.demotions) * self._bytes_per_block, output.demote_s)
        num_decodes = plan.num_decodes + plan.num_drafted + plan.num_drafts
        num_prefill = plan.num_tokens - num_decodes
        compute_s = run_s - output.copy_s - output.demote_s
        if not num_prefill and not num_copied:
            self._costs.rows.observe(plan.num_tokens, compute_s)
        if num_prefill <= 0 or compute_s <= 0 or (num_copied and not output.copy_s):
            return  # a step with copies that were not timed may have waited for them
        self._budget.observe(plan.num_tokens, compute_s)  # of every such step, or a low budget would stay low
        if num_prefill >= max(MIN_PREFILL_TOKENS, num_decodes):
            self._costs.observe_prefill(plan.num_tokens, compute_s)
            rate = plan.num_tokens / compute_s
            weight = WEIGHT if self.prefill_tokens_per_s else 1.0
            self.prefill_tokens_per_s += weight * (rate - self.prefill_tokens_per_s)

    @property
    def step_s(self) -> float:
        """The median of the last steps that ran anything."""
        recent = list(self._recent)
        return median(recent) if recent else 0.0
