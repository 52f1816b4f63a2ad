"""Which idle blocks a step copies to the host pool, ahead of their eviction.

Steps to come evict the blocks that have been idle longest, as soon as no block is free. As many blocks as two full
steps can evict are kept ready for that: free, or demoted. Each step demotes no more than it takes, so that its copies
need less time than its tokens. While the copies of an earlier step are under way, a step demotes nothing.
"""

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.scheduling.state.step import StepPlan
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.steps.runner import StepOutput

STEPS_AHEAD = 2


class Demoter:
    """Adds demotions to plans that run something."""

    def __init__(self, workload: Workload, costs: CostModel) -> None:
        self._tables = workload.tables
        self._info = workload.info
        self._costs = costs
        self._num_ready = STEPS_AHEAD * self._tables.device.blocks_for(workload.config.max_batch_tokens)
        self._busy = False

    def note_output(self, output: StepOutput) -> None:
        """Notes whether the copies of a step, or of an earlier one, are still under way."""
        self._busy = output.is_copying

    def add_demotions(self, plan: StepPlan) -> None:
        """Has the plan demote blocks, if that is worth it: the copy out and back is quicker than computing them."""
        tables, info = self._tables, self._info
        num_wanted = self._num_ready - tables.device.num_free
        if num_wanted <= 0 or not tables.tier.enabled or self._busy or not plan.chunks:
            return
        if not self._costs.swap_is_cheaper(info.bytes_per_block, info.block_size):
            return
        limit = tables.device.blocks_for(plan.num_tokens) + len(plan.input.swap_in)
        if tables.tier.demote(tables.cache.next_evicted(num_wanted), limit):
            plan.input.demotions = tables.tier.demotions()
