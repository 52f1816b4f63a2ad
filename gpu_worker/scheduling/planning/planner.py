"""What a step holds: decodes first, then prompts under way, then swapped-in sequences, then new prompts.

One budget of tokens covers all of them. A long prompt gets a share of the budget while others compete, and at the end
what is left over. So it neither starves short prompts nor is starved. A plan that had to preempt a sequence for a
branch that runs brings no sequence in.
"""

from gpu_worker.scheduling.planning.demoter import Demoter
from gpu_worker.scheduling.planning.preemption import Preemption
from gpu_worker.scheduling.planning.slot_allocator import SlotAllocator
from gpu_worker.scheduling.planning.starter import Starter
from gpu_worker.scheduling.planning.step_budget import StepBudget
from gpu_worker.scheduling.state.sequence import RUNNING, Branch, Sequence
from gpu_worker.scheduling.state.step import Chunk, StepPlan
from gpu_worker.scheduling.state.workload import Workload


class Planner:
    """Fills plans from a workload."""

    def __init__(
        self,
        workload: Workload,
        preemption: Preemption,
        slots: SlotAllocator,
        starter: Starter,
        demoter: Demoter,
        budget: StepBudget,
    ) -> None:
        self._workload = workload
        self._lists = workload.lists
        self._preemption = preemption
        self._slots = slots
        self._starter = starter
        self._demoter = demoter
        self._budget = budget
        self._turn = 0
        self._secured: set[Sequence] = set()  # searches with slots for the next token of all beams

    def fill(self, plan: StepPlan, now: float) -> None:
        """Decides what the step runs and takes the blocks for it."""
        self._preemption.begin_plan()
        for only in self._turns():
            self._compose(plan, only, now)
            if plan.chunks:
                self._preemption.note_progress()
                break
        self._workload.tables.add_moves(plan)
        self._demoter.add_demotions(plan)

    def _turns(self) -> list[Sequence | None]:
        """For whom the step may be, in the order to try: those that share steps (None), or one that runs alone.

        While steps are reserved for a suspect, there is none but the suspect, once its trial has begun and if it is
        still here. Without a trial it does not run.
        """
        work = self._workload
        if work.reserved_for is not None:
            return [work.on_trial] if work.on_trial in work.loners else []
        loners = [sequence for sequence in work.loners if not sequence.alone]
        if not loners:
            return [None]
        turns = [None, *loners]
        self._turn = (self._turn + 1) % len(turns)
        return turns[self._turn :] + turns[: self._turn]

    def _compose(self, plan: StepPlan, only: Sequence | None, now: float) -> None:
        """Fills the plan with chunks of `only`, or, if that is None, of the sequences that share steps."""
        work, config = self._workload, self._workload.config
        stalled: list[Branch] = []
        prefills: list[Chunk] = []
        self._secured.clear()
        if not config.chunked_prefill:
            prefills = self._prefills(only, self._budget.for_prompts(0), stalled, now)
        if not prefills:
            stalled += self._secure(only, now)
            if not self._preemption.happened:
                self._starter.swap_in(only, now)
            if config.chunked_prefill:
                budget = self._budget.for_prompts(self._num_rows(only))
                prefills = self._prefills(only, budget, stalled, now)
            self._add_decodes(plan, only, stalled)
        self._add_prefills(plan, prefills)
        has_prompts = bool(prefills)
        if not plan.chunks and not work.tables.host.has_copies_in:
            stalled += [branch for branch in self._stuck_beams(only) if branch not in stalled]
            if stalled:
                self._force(plan, only, stalled, now)
                has_prompts = True  # the forced branch may be one
        plan.num_tokens = sum(chunk.length for chunk in plan.chunks) if has_prompts else len(plan.chunks)
        plan.num_branches = sum(len(chunk.samples) for chunk in plan.chunks) if has_prompts else len(plan.chunks)

    # Decodes

    def _secure(self, only: Sequence | None, now: float) -> list[Branch]:
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
            if work.pauses and not runs_in(branch.sequence, only):
                others.append(branch)
            elif not slots.secure(branch, now):
                stalled.append(branch)
        for sequence in list(lists.searches):
            if not (runs_in(sequence, only) and in_lockstep(sequence)):
                continue
            if slots.secure_beams(sequence, now):
                self._secured.add(sequence)
            else:
                stalled.append(sequence.branches[0])
        stalled = [branch for branch in stalled if branch.state is RUNNING]
        lists.hand_back_needy(others + [branch for branch in stalled if branch.sequence.search is None])
        return stalled

    def _num_rows(self, only: Sequence | None) -> int:
        """How many decodes and beams the step can have."""
        decodes = self._lists.decodes
        num_rows = len(decodes)
        if self._workload.pauses:
            num_rows = sum(runs_in(chunk.branch.sequence, only) for chunk in decodes)
        return num_rows + sum(len(sequence.branches) for sequence in self._secured)

    def _add_decodes(self, plan: StepPlan, only: Sequence | None, stalled: list[Branch]) -> None:
        lists = self._lists
        without_slot = set(stalled).union(lists.needy)
        if without_slot or self._workload.pauses:
            plan.chunks = [
                chunk
                for chunk in lists.decodes
                if chunk.branch not in without_slot and runs_in(chunk.branch.sequence, only)
            ]
        else:
            plan.chunks = list(lists.decodes)
        plan.num_decodes = len(plan.chunks)
        for sequence in lists.searches:
            if sequence in self._secured:
                plan.chunks += [Chunk(branch, branch.num_computed, 1, (branch,)) for branch in sequence.branches]

    # Prompts

    def _prefills(self, only: Sequence | None, budget: int, stalled: list[Branch], now: float) -> list[Chunk]:
        work = self._workload
        unfinished = [branch for branch in self._lists.prefilling if runs_in(branch.sequence, only)]
        crowded = len(unfinished) + len(work.waiting) > 1
        share = max(work.info.block_size, budget // work.config.max_partial_prefills)
        chunks: list[Chunk] = []
        for branch in unfinished:
            if budget <= 0:
                break
            left = branch.prefill_end - branch.num_computed
            length = min(left, budget, share if crowded and left > self._budget.long_prefill else left)
            chunk = self._slots.prefill(branch, length, now) if branch.state is RUNNING else None
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.length
            elif branch.state is RUNNING:
                stalled.append(branch)
        if budget > 0 and work.waiting and not self._preemption.happened:
            started = self._starter.start(only, budget, share, chunks, now)
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
                chunk.samples = tuple(sequence.branches) if sequence.fan_out else (branch,)
            if chunk.score_end > (first := max(branch.first_unscored, chunk.start + 1)):
                chunk.score_from = first
            plan.chunks.append(chunk)

    # When no branch could advance

    def _stuck_beams(self, only: Sequence | None) -> list[Branch]:
        """A beam on the device of each search that has other beams to start again."""
        searches = (s for s in self._lists.searches if s.queued and runs_in(s, only))
        return [next(branch for branch in s.branches if branch.state is RUNNING) for s in searches]

    def _force(self, plan: StepPlan, only: Sequence | None, stalled: list[Branch], now: float) -> None:
        """Lets the branch of the lowest rank among the stalled ones advance, at the cost of all sequences after it."""
        lists = self._lists
        first = min(stalled, key=lambda branch: branch.rank)
        others = [branch for branch in stalled if branch is not first]
        if first in lists.prefilling:
            chunk = self._slots.prefill(first, 1, now, forced=True)
            self._add_prefills(plan, [chunk] if chunk else [])
        elif first.sequence.queued and first.sequence.search is not None:
            self._preemption.unstick(first, now)
        elif first.sequence.search is not None:
            if self._slots.secure_beams(first.sequence, now, forced=True):
                self._secured.add(first.sequence)
                self._add_decodes(plan, only, others)
        elif self._slots.secure(first, now, forced=True):
            lists.hand_back_needy(branch for branch in lists.take_needy() if branch is not first)
            self._add_decodes(plan, only, others)


def runs_in(sequence: Sequence, only: Sequence | None) -> bool:
    """Whether the sequence may be in a step that is for `only`, or, if that is None, for all that share steps."""
    if sequence.frozen:
        return False
    return sequence is only if only is not None else not sequence.runs_alone


def in_lockstep(sequence: Sequence) -> bool:
    """Whether all beams have all but their last token computed."""
    return all(
        branch.state is RUNNING and branch.num_computed == len(branch.tokens) - 1 and branch.num_output > 0
        for branch in sequence.branches
    )
