"""What a step holds: decodes first, then prompts under way, then swapped-in sequences, then new prompts.

One budget of tokens covers all of them. A long prompt gets a share of the budget while others compete, and at the end
what is left over. So it neither starves short prompts nor is starved. A plan that had to preempt a sequence for a
branch that runs brings no sequence in.
"""

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.drafting.draft_model import DraftModel
from gpu_worker.scheduling.planning.demoter import Demoter
from gpu_worker.scheduling.planning.draft_planner import DraftPlanner
from gpu_worker.scheduling.planning.preemption import Preemption
from gpu_worker.scheduling.planning.slot_allocator import SlotAllocator
from gpu_worker.scheduling.planning.starter import Starter
from gpu_worker.scheduling.state.scheduler_config import StepBudget
from gpu_worker.scheduling.state.sequence import QUEUED, RUNNING, Branch, Hold, Place, Sequence
from gpu_worker.scheduling.state.step import Chunk, StepPlan
from gpu_worker.scheduling.state.workload import Workload


class Planner:
    def __init__(
        self, workload: Workload, costs: CostModel, budget: StepBudget, draft_model: DraftModel | None = None
    ) -> None:
        self._workload = workload
        self._lists = workload.lists
        self.preemption = preemption = Preemption(workload, costs)
        self._slots = slots = SlotAllocator(workload.tables, preemption)
        self.starter = Starter(workload, preemption, slots, costs, budget)
        self.demoter = Demoter(workload, costs)
        self.drafts = DraftPlanner(workload, costs.rows, draft_model) if workload.config.speculation != "off" else None
        self._budget = budget
        self._turn = 0
        self._secured: set[Sequence] = set()  # searches with slots for the next token of all beams

    def fill(self, plan: StepPlan) -> None:
        """Decides what the step runs and takes the blocks for it."""
        work = self._workload
        self.preemption.happened = False
        for turn in self._turns():
            work.turn = turn
            self._compose(plan)
            if plan.chunks:
                self.preemption.stuck = None
                break
        work.tables.add_moves(plan)
        self.demoter.add_demotions(plan)

    def _turns(self) -> list[Sequence | None]:
        """For whom the step may be, in the order to try: a suspect, or those that share steps (None).

        While steps are reserved for a suspect, there is none but the suspect, once its trial has begun and if it is
        still here. Suspects of a failed step have their turns without a trial; others do not run.
        """
        work = self._workload
        if work.reserved_for is not None:
            return [work.on_trial] if work.on_trial in work.suspects else []
        turns = [None, *(suspect for suspect in work.suspects if Hold.CRASHED not in suspect.holds)]
        if len(turns) > 1:
            self._turn = (self._turn + 1) % len(turns)
        return turns[self._turn :] + turns[: self._turn]

    def _compose(self, plan: StepPlan) -> None:
        work, config = self._workload, self._workload.config
        stalled: list[Branch] = []
        prefills: list[Chunk] = []
        self._secured.clear()
        if not config.chunked_prefill:
            prefills = self._prefills(self._budget.for_prompts(0), stalled)
        if not prefills:
            stalled += self._secure()
            if not self.preemption.happened:
                self.starter.swap_in()
            if config.chunked_prefill:
                prefills = self._prefills(self._budget.for_prompts(self._num_rows()), stalled)
            self._add_decodes(plan, stalled)
        self._add_prefills(plan, prefills)
        has_prompts = bool(prefills)
        if not plan.chunks and not work.tables.host.has_copies_in:
            stalled += [branch for branch in self._stuck_beams() if branch not in stalled]
            if stalled:
                self._force(plan, stalled)
                has_prompts = True  # the forced branch may be one
        plan.num_tokens = sum(chunk.length for chunk in plan.chunks) if has_prompts else len(plan.chunks)
        plan.num_branches = sum(len(chunk.samples) for chunk in plan.chunks) if has_prompts else len(plan.chunks)
        if self.drafts is not None and plan.num_decodes:
            self.drafts.add(plan)

    # Decodes

    def _secure(self) -> list[Branch]:
        """Gets every decode and every beam a slot for its next token; the branches that have to wait for one."""
        work, lists, slots = self._workload, self._lists, self._slots
        if not (lists.needy or lists.searches):
            return []
        needy = lists.take_needy()
        if len(needy) > work.tables.device.num_available:
            needy.sort(key=lambda branch: branch.rank)
        stalled: list[Branch] = []
        others: list[Branch] = []
        for branch in needy:
            if branch.state is not RUNNING:
                continue
            if work.leaves_out and not work.may_run(branch.sequence):
                others.append(branch)
            elif not slots.secure(branch):
                stalled.append(branch)
        for sequence in list(lists.searches):
            if not (work.may_run(sequence) and in_lockstep(sequence)):
                continue
            if slots.secure_beams(sequence):
                self._secured.add(sequence)
            else:
                stalled.append(sequence.branches[0])
        stalled = [branch for branch in stalled if branch.state is RUNNING]
        lists.hand_back_needy(others + [branch for branch in stalled if branch.sequence.search is None])
        return stalled

    def _num_rows(self) -> int:
        decodes, work = self._lists.decodes, self._workload
        num_rows = sum(work.may_run(chunk.branch.sequence) for chunk in decodes) if work.leaves_out else len(decodes)
        return num_rows + sum(len(sequence.branches) for sequence in self._secured)

    def _add_decodes(self, plan: StepPlan, stalled: list[Branch]) -> None:
        lists, work = self._lists, self._workload
        without_slot = set(stalled).union(lists.needy)
        plan.chunks = list(lists.decodes)
        if without_slot or work.leaves_out:
            going = (chunk for chunk in lists.decodes if chunk.branch not in without_slot)
            plan.chunks = [chunk for chunk in going if work.may_run(chunk.branch.sequence)]
        plan.num_decodes = len(plan.chunks)
        for sequence in lists.searches:
            if sequence in self._secured:
                plan.chunks += [Chunk(branch, branch.num_computed, 1, (branch,)) for branch in sequence.branches]

    # Prompts

    def _prefills(self, budget: int, stalled: list[Branch]) -> list[Chunk]:
        work = self._workload
        unfinished = [branch for branch in self._lists.prefilling if work.may_run(branch.sequence)]
        crowded = len(unfinished) + len(work.waiting) > 1
        share = max(work.info.block_size, budget // work.config.max_partial_prefills)
        chunks: list[Chunk] = []
        for branch in unfinished:
            if budget <= 0:
                break
            left = branch.prefill_end - branch.num_computed
            length = min(left, budget, share if crowded and left > self._budget.long_prefill else left)
            chunk = self._slots.prefill(branch, length) if branch.state is RUNNING else None
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.length
            elif branch.state is RUNNING:
                stalled.append(branch)
        if budget > 0 and work.waiting and not self.preemption.happened:
            started = self.starter.start(budget, share, chunks)
            budget -= sum(chunk.length for chunk in started)
            chunks += started
        for chunk in chunks:
            if budget > 0 and chunk.branch.state is RUNNING:
                budget -= self._slots.extend(chunk, budget)
        return [chunk for chunk in chunks if chunk.branch.state is RUNNING]

    def _add_prefills(self, plan: StepPlan, prefills: list[Chunk]) -> None:
        for chunk in prefills:
            branch = chunk.branch
            end = chunk.start + chunk.length
            if end == len(branch.tokens):
                sequence = branch.sequence
                if sequence.pooling is None:
                    chunk.samples = tuple(sequence.branches) if sequence.forks else (branch,)
            if chunk.score_end > (first := max(branch.first_unscored, chunk.start + 1)):
                chunk.score_from = first
            plan.chunks.append(chunk)

    # When no branch could advance

    def _stuck_beams(self) -> list[Branch]:
        """A beam on the device of each search that has other beams to start again."""
        work = self._workload
        searches = [s for s in self._lists.searches if s.place is Place.STARTING and work.may_run(s)]
        return [next(branch for branch in s.branches if branch.state is RUNNING) for s in searches]

    def _force(self, plan: StepPlan, stalled: list[Branch]) -> None:
        """Lets the branch of the lowest rank among the stalled ones advance, at the cost of all sequences after it."""
        lists = self._lists
        first = min(stalled, key=lambda branch: branch.rank)
        others = [branch for branch in stalled if branch is not first]
        if first in lists.prefilling:
            chunk = self._slots.prefill(first, 1, forced=True)
            self._add_prefills(plan, [chunk] if chunk else [])
        elif first.sequence.search is None:
            if self._slots.secure(first, forced=True):
                lists.hand_back_needy(branch for branch in lists.take_needy() if branch is not first)
                self._add_decodes(plan, others)
        elif first.sequence.place in QUEUED:
            self.preemption.unstick(first)
        elif self._slots.secure_beams(first.sequence, forced=True):
            self._secured.add(first.sequence)
            self._add_decodes(plan, others)


def in_lockstep(sequence: Sequence) -> bool:
    """Whether all beams have all but their last token computed."""
    return all(
        branch.state is RUNNING and branch.num_computed == len(branch.tokens) - 1 and branch.num_output > 0
        for branch in sequence.branches
    )
