"""Who runs: sequences are admitted, planned into steps, and what steps bring is committed. Pure Python, one thread.

    admit ─▶ waiting ─▶ running ◀─▶ swapped        plan() moves sequences along these arrows
                ▲          │
                └──────────┘ recompute              commit() appends, finishes, frees

`plan` and `commit` (or `abort_step`) alternate; everything else may be called at any time between two calls of this
thread. While a step is in flight, cancel, drop and end_branch take effect when it is committed.
"""

import heapq
import time
from collections.abc import Callable
from typing import Literal

from gpu_worker.blocks.prefix_cache import PrefixCache
from gpu_worker.blocks.swap import CostModel
from gpu_worker.scheduling.admission import prepare, take_in, too_large
from gpu_worker.scheduling.committer import Committer
from gpu_worker.scheduling.load import Load
from gpu_worker.scheduling.planner import Planner
from gpu_worker.scheduling.policy import SchedulerConfig
from gpu_worker.scheduling.preemption import Preemption
from gpu_worker.scheduling.sequence import Branch, Sequence
from gpu_worker.scheduling.starter import Starter
from gpu_worker.scheduling.step import RunnerInfo, StepOutput, StepPlan, StepResult
from gpu_worker.scheduling.step_budget import StepBudget
from gpu_worker.scheduling.workload import FINISHED, RUNNING, WAITING, Workload, prefill_end
from octavo.errors import NotFound, OutOfBlocks, StaleEpoch, TooLarge
from octavo.ids import SequenceId
from octavo.record import AdmissionAnswer, AdmissionOutcome
from octavo.sampling import FinishReason

MAX_STALE_DEADLINES = 64


class Scheduler:
    """Owns the sequences of a worker and their blocks; see the module."""

    def __init__(self, config: SchedulerConfig, info: RunnerInfo, clock: Callable[[], float] = time.monotonic) -> None:
        if info.block_size < 1 or info.block_size & (info.block_size - 1):
            raise ValueError(f"block_size: {info.block_size} is not a power of two")
        self.config = config
        self.info = info
        self._work = Workload(config, info, clock)
        self._preemption = Preemption(self._work)
        self._planner = Planner(self._work, self._preemption)
        self._committer = Committer(self._work)
        self._starter = Starter(self._work, self._preemption)
        self._clock = clock
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._num_admitted = 0
        self._num_steps = 0
        self._in_flight: StepPlan | None = None
        self._ending: dict[Sequence, FinishReason | None] = {}  # when the step in flight is over; None: without a word
        self._ending_branches: list[Branch] = []  # likewise

    @property
    def sequences(self) -> dict[SequenceId, Sequence]:
        return self._work.sequences

    @property
    def cache(self) -> PrefixCache:
        return self._work.cache

    @property
    def costs(self) -> CostModel:
        """What preemption weighs; whoever measures calls its `observe_*`."""
        return self._work.costs

    @property
    def budget(self) -> StepBudget:
        """How many tokens a step may run; whoever measures calls its `observe`."""
        return self._work.budget

    @property
    def workload(self) -> Workload:
        """The blocks and lists themselves, for transfer and tests."""
        return self._work

    @property
    def has_work(self) -> bool:
        """Whether a step would bring anything now."""
        work = self._work
        if work.active or work.waiting or work.pending:
            return True
        now = self._clock()
        due = self._deadlines and self._deadlines[0][0] <= now
        return bool(due) or any(sequence.hold_until <= now for sequence in work.swapped)

    # Sequences come and go

    def admit(self, sequence: Sequence) -> AdmissionAnswer:
        """Puts a sequence into the waiting queue, or says why not.

        A sequence that is here at the same epoch is ADMITTED and goes on as it is. A newer one here is STALE_EPOCH. An
        older one here is dropped whatever the answer is, because the store has given it to a new owner.
        """
        known = self.sequences.get(sequence.seq_id)
        if known is not None and known.epoch == sequence.epoch:
            return AdmissionAnswer(AdmissionOutcome.ADMITTED)
        if known is not None and known.epoch > sequence.epoch:
            return AdmissionAnswer(AdmissionOutcome.STALE_EPOCH, stale_epoch(known, sequence.epoch).failure())
        self.drop(sequence.seq_id)
        prepare(sequence, self.info)
        if refusal := too_large(sequence, self._work):
            return AdmissionAnswer(AdmissionOutcome.NEVER, TooLarge(refusal).failure())
        if len(self._work.waiting) >= self.config.max_waiting:
            full = OutOfBlocks(f"{len(self._work.waiting)} sequences are waiting already")
            return AdmissionAnswer(AdmissionOutcome.LATER, full.failure())
        sequence.order = self._num_admitted
        self._num_admitted += 1
        take_in(sequence, self._work)
        if sequence.deadline is not None:
            self._watch_deadline(sequence, sequence.deadline)
        return AdmissionAnswer(AdmissionOutcome.ADMITTED)

    def _watch_deadline(self, sequence: Sequence, deadline: float) -> None:
        """Those of sequences that have ended are forgotten in time, however far off they are."""
        if len(self._deadlines) > MAX_STALE_DEADLINES + 2 * len(self.sequences):
            self._deadlines = [entry for entry in self._deadlines if self.sequences.get(entry[2].seq_id) is entry[2]]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, sequence.order, sequence))

    def cancel(self, seq_id: SequenceId, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Ends a sequence with what it has; its terminal deltas come with the next step. False if it is not here."""
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            return False
        if self._in_flight is not None:
            self._ending.setdefault(sequence, reason)
        else:
            self._work.pending += self._work.end(sequence, reason)
        return True

    def drop(self, seq_id: SequenceId) -> None:
        """Forgets a sequence that has another owner: at once, without a delta. Unknown is fine."""
        pending = self._work.pending
        self._work.pending = [delta for delta in pending if delta.sequence.seq_id != seq_id]
        sequence = self.sequences.pop(seq_id, None)
        if sequence is None:
            return
        if self._in_flight is not None:
            self._ending[sequence] = None
        else:
            self._work.drop(sequence)

    def end_branch(self, seq_id: SequenceId, branch_index: int) -> bool:
        """Runs one branch no further, without a delta: whoever reads its text has found its end. The others go on.

        False if there is nothing to end. Beams compete until their search ends, so none of them can be ended alone.
        """
        sequence = self.sequences.get(seq_id)
        if sequence is None or sequence.beams is not None or sequence.fan_out:
            return False
        branch = next((b for b in sequence.branches if b.index == branch_index and b.state is not FINISHED), None)
        if branch is None:
            return False
        if self._in_flight is not None:
            self._ending_branches.append(branch)
        else:
            self._end_branch(branch)
        return True

    def _end_branch(self, branch: Branch) -> None:
        work, sequence = self._work, branch.sequence
        if branch.state is FINISHED:
            return
        work.finish(branch, FinishReason.STOP)
        if all(other.state is not WAITING for other in sequence.branches):
            work.dequeue(sequence)
        work.tidy()

    # Steps

    def plan(self) -> StepPlan:
        """What the next step runs, with the blocks for it taken."""
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.step_id} has not been committed")
        now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if self.sequences.get(sequence.seq_id) is sequence:
                self._work.pending += self._work.end(sequence, FinishReason.DEADLINE)
        self._num_steps += 1
        plan = StepPlan(self._num_steps)
        self._planner.fill(plan, now)
        if self.config.debug:
            self._check()
        self._in_flight = plan
        return plan

    def commit(self, plan: StepPlan, output: StepOutput) -> StepResult:
        """Takes in what the step brought."""
        result = self._settle(plan)
        self._committer.apply(plan, output, result)
        for sequence in [loner for loner in self._work.loners if loner.suspect]:
            if any(chunk.branch.sequence is sequence for chunk in plan.chunks):
                sequence.suspect = False
                if not sequence.alone:
                    self._work.loners.remove(sequence)
        if self.config.debug:
            self._check()
        return result

    def abort_step(self, plan: StepPlan, failure: str) -> StepResult:
        """The runner raised: nothing of the step counts, and what it was to write is computed again.

        Each sequence of the step then runs alone once, so only one that fails by itself ends with `failure`
        (JSON of octavo.errors.Failure), and no other is lost with it.
        """
        work = self._work
        moved = work.protected | work.moved_out
        result = self._settle(plan)
        ran = {chunk.branch.sequence: None for chunk in plan.chunks}
        for sequence in [*ran, *moved]:
            if self.sequences.get(sequence.seq_id) is not sequence:
                continue
            if sequence.suspect and len(ran) == 1 and sequence in ran:
                result.deltas += work.end(sequence, FinishReason.ERROR, failure)
                continue
            self._preemption.recompute(sequence)
            if sequence in ran:
                sequence.suspect = True
                if sequence not in work.loners:
                    work.loners.append(sequence)
        if self.config.debug:
            self._check()
        return result

    def _settle(self, plan: StepPlan) -> StepResult:
        """The step is over: what waited for that happens."""
        if self._in_flight is not plan:
            raise RuntimeError(f"step {plan.step_id} is not the one in flight")
        self._in_flight = None
        work = self._work
        work.end_step()
        result = StepResult(plan.step_id, work.pending, plan.num_branches, plan.num_tokens)
        work.pending = []
        branches, self._ending_branches = self._ending_branches, []
        for branch in branches:
            self._end_branch(branch)
        ending, self._ending = self._ending, {}
        for sequence, reason in ending.items():
            if reason is None:
                work.drop(sequence)
            elif self.sequences.get(sequence.seq_id) is sequence:
                result.deltas += work.end(sequence, reason)
        return result

    # Blocks

    def swap(self, seq_id: SequenceId, epoch: int, operation: Literal["out", "in", "drop"]) -> int:
        """Moves a sequence's blocks between steps; how many moved or were freed, 0 if it was so already.

        A sequence moved out stays there for `min_preempt_interval_s`, or until it is moved in. Raises NotFound,
        StaleEpoch, or OutOfBlocks when the other side has no room for it now.
        """
        if self._in_flight is not None:
            raise RuntimeError("blocks move between steps only")
        work = self._work
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            raise NotFound(f"sequence {seq_id} is not on this worker")
        if sequence.epoch != epoch:
            raise stale_epoch(sequence, epoch)
        if operation == "drop":
            return self._preemption.recompute(sequence) if sequence in work.active or sequence.swapped else 0
        if operation == "in":
            return self._starter.bring_back(sequence)
        if sequence not in work.active:
            return 0
        return self._preemption.send_away(sequence, until=self._clock() + self.config.min_preempt_interval_s)

    # State

    def load(self) -> Load:
        """How busy it is now."""
        work = self._work
        waiting = (b for s in work.waiting for b in s.branches[: 1 if s.fan_out else None] if b.state is WAITING)
        to_compute: list[Branch] = [*waiting, *work.prefilling]
        return Load(
            num_running=sum(b.state is RUNNING for s in work.active for b in s.branches),
            num_waiting=len(work.waiting),
            num_swapped=len(work.swapped),
            num_sequences=len(self.sequences),
            num_free_blocks=work.blocks.num_free,
            num_cached_blocks=work.blocks.num_cached,
            num_used_blocks=work.blocks.num_used,
            num_free_host_blocks=work.host.num_free,
            num_prefill_tokens=sum(prefill_end(branch) - branch.num_computed for branch in to_compute),
            num_preempted_swap=work.num_preempted_swap,
            num_preempted_recompute=work.num_preempted_recompute,
        )

    def check(self) -> None:
        """Recounts blocks, tables and lists from scratch; raises AssertionError with what is wrong."""
        if self._in_flight is None:
            self._check()

    def _check(self) -> None:
        self._work.check()


def stale_epoch(sequence: Sequence, epoch: int) -> StaleEpoch:
    """The sequence is here, at another epoch than the one asked for."""
    return StaleEpoch(f"sequence {sequence.seq_id} runs here at epoch {sequence.epoch}, not {epoch}")
