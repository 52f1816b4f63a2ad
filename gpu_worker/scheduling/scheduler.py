"""The scheduler admits sequences, plans the steps in which they run, and commits what those steps brought.

    admit ─▶ waiting ─▶ running ◀─▶ swapped        plan() moves sequences along these arrows
                ▲          │
                └──────────┘ recompute              commit() appends, finishes, frees

Pure Python, one thread. `plan` and `commit` (or `abort_step`) alternate. The same thread may call all other methods
between two of these calls. While a step is in flight, cancel, drop and end_branch take effect when it is over.
"""

import heapq
import time
from collections.abc import Callable

from gpu_worker.blocks.cost_model import CostModel
from gpu_worker.drafting.draft_model import DraftModel
from gpu_worker.scheduling.committer import Committer
from gpu_worker.scheduling.planning.admitter import Admitter
from gpu_worker.scheduling.planning.planner import Planner
from gpu_worker.scheduling.state.scheduler_config import StepBudget
from gpu_worker.scheduling.state.sequence import FINISHED, QUEUED, Branch, Hold, Place, Sequence
from gpu_worker.scheduling.state.step import StepItems, StepPlan, SwapOperation
from gpu_worker.scheduling.state.workload import Workload, stale_epoch
from gpu_worker.scheduling.step_inputs import StepInputs
from gpu_worker.steps.runner import StepOutput
from gpu_worker.steps.step_input import StepInput
from octavo.request.errors import CannotMove, Failure, InvalidArgument
from octavo.request.ids import SequenceId
from octavo.request.record import AdmissionAnswer, AdmissionOutcome
from octavo.request.sampling import FinishReason

MAX_STALE_DEADLINES = 64


class Scheduler:
    """Runs the sequences of a workload. It reads `costs` and `budget`, into which the engine puts its measurements."""

    def __init__(
        self,
        workload: Workload,
        costs: CostModel,
        budget: StepBudget,
        clock: Callable[[], float] = lambda: time.monotonic(),
        draft_model: DraftModel | None = None,
    ) -> None:
        self._workload = workload
        self._planner = Planner(workload, costs, budget, draft_model)
        self._inputs = StepInputs(workload)
        self._committer = Committer(workload)
        self._admitter = Admitter(workload)
        self._clock = clock
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._num_steps = 0
        self._in_flight: StepPlan | None = None
        self._ending: dict[Sequence, FinishReason] = {}  # after the step in flight; NONE: dropped
        self._ending_branches: list[Branch] = []  # after the step in flight

    @property
    def has_work(self) -> bool:
        """Whether a step would bring anything now."""
        work = self._workload
        if len(work.active) > len(work.frozen) or work.pending:
            return True
        if not all(sequence.kept_back for queue in (work.waiting, work.swapped) for sequence in queue):
            return True
        return bool(self._deadlines) and self._deadlines[0][0] <= self._clock()

    # Sequences come and go

    def admit(self, sequence: Sequence) -> AdmissionAnswer:
        """Puts a sequence into the waiting queue, or says why not.

        If the sequence is here at the same epoch, the answer is ADMITTED, and it goes on as it is. If it is here at a
        newer epoch, the answer is STALE_EPOCH. If it is here at an older epoch, that old one is dropped, whatever the
        answer is, because the store has moved the sequence to the new epoch.

        A sequence that has moved here with its blocks (`Sequence.carried`) runs in the next step, if its blocks and
        those for its next tokens are there; else it is computed again, in its turn.
        """
        known = self._workload.sequences.get(sequence.seq_id)
        if known is not None and known.epoch == sequence.epoch:
            return AdmissionAnswer(AdmissionOutcome.ADMITTED)
        if known is not None and known.epoch > sequence.epoch:
            return AdmissionAnswer(AdmissionOutcome.STALE_EPOCH, stale_epoch(known, sequence.epoch).failure())
        self._workload.discard_pending(sequence.seq_id)
        if known is not None:
            self.drop(known)
        answer = self._admitter.admit(sequence)
        if sequence.carried is not None and sequence.place in QUEUED and self._in_flight is None:
            self._planner.starter.resume(sequence)
        if answer.admitted and sequence.deadline is not None:
            self._watch_deadline(sequence, sequence.deadline)
        return answer

    def cancel(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> bool:
        """Ends a sequence with what it has; its last items come with the next step. False if it is not here."""
        if not self.is_here(sequence):
            return False
        if self._in_flight is not None:
            self._ending.setdefault(sequence, reason)
        else:
            self._workload.report(self._workload.end(sequence, reason))
        return True

    def drop(self, sequence: Sequence) -> None:
        """Forgets a sequence that has another owner, without an item. Does nothing if it is not here."""
        if not self.is_here(sequence):
            return
        self._workload.discard_pending(sequence.seq_id)
        if self._in_flight is not None:
            del self._workload.sequences[sequence.seq_id]
            self._ending[sequence] = FinishReason.NONE
        else:
            self._workload.drop(sequence)

    def end_branch(self, sequence: Sequence, branch_index: int) -> bool:
        """Ends one branch without an item: its end is known already (a stop string). The other branches go on.

        False if there is nothing to end. Beams compete until their search ends, so none of them can be ended alone.
        """
        if not self.is_here(sequence) or sequence.search is not None or sequence.forks:
            return False
        branch = next((b for b in sequence.branches if b.index == branch_index and b.state is not FINISHED), None)
        if branch is None:
            return False
        if self._in_flight is not None:
            self._ending_branches.append(branch)
        else:
            self._workload.finish(branch)
        return True

    # Trials. Only one suspect at a time may have the steps to itself.

    def reserve_steps(self, sequence: Sequence) -> bool:
        """Lets no other sequence run until `end_trial`, for a suspect of crashes. It waits, too.

        False if the sequence is not here. All steps that had other sequences are over when this returns.
        """
        self._require_no_step("a trial begins and ends")
        if not self.is_here(sequence):
            return False
        self._workload.reserved_for, self._workload.on_trial = sequence, None
        return True

    def begin_trial(self, sequence: Sequence) -> bool:
        """Lets the sequence run for which the steps are reserved. False if the steps are not reserved for it."""
        if self._workload.reserved_for is not sequence:
            return False
        self._workload.on_trial = sequence
        return True

    def end_trial(self, sequence: Sequence) -> None:
        """Lets the sequence, if it is still here, and all others share steps again."""
        work = self._workload
        if work.reserved_for is sequence:
            work.reserved_for = work.on_trial = None
            work.end_hold(sequence, Hold.CRASHED)

    def is_here(self, sequence: Sequence) -> bool:
        """Whether this very sequence is here: neither ended nor replaced by another admission."""
        return self._workload.sequences.get(sequence.seq_id) is sequence

    def _watch_deadline(self, sequence: Sequence, deadline: float) -> None:
        """Remembers a deadline. Deadlines of ended sequences are forgotten now and then, so they do not pile up."""
        if len(self._deadlines) > MAX_STALE_DEADLINES + 2 * len(self._workload.sequences):
            self._deadlines = [entry for entry in self._deadlines if self.is_here(entry[2])]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, sequence.order, sequence))

    # Steps

    def plan(self) -> StepPlan:
        if self._in_flight is not None:
            raise RuntimeError(f"step {self._in_flight.input.step_id} has not been committed")
        work = self._workload
        work.now = self._clock()
        while self._deadlines and self._deadlines[0][0] <= work.now:
            _, _, sequence = heapq.heappop(self._deadlines)
            if self.is_here(sequence):
                work.report(work.end(sequence, FinishReason.DEADLINE))
        self._num_steps += 1
        plan = StepPlan(StepInput(self._num_steps))
        self._planner.fill(plan)
        if plan.chunks:
            self._inputs.fill(plan)
        self._check()
        self._in_flight = plan
        return plan

    def end_copies(self, plan: StepPlan) -> None:
        """Takes in that the copies of the step in flight are made, and only its chunks still run.

        From then on no block matters to the step but those in the tables of its branches. If the step fails, what was
        copied stays where it is.
        """
        self._require_in_flight(plan)
        self._workload.tables.end_step(done=True)

    def commit(self, plan: StepPlan, output: StepOutput) -> StepItems:
        work = self._workload
        result = self._settle(plan, done=True)
        self._planner.demoter.note_output(output)
        self._committer.apply(plan, output, result)
        if work.turn is not None and plan.chunks:
            work.end_hold(work.turn, Hold.FAILED)
        self._check()
        return result

    def abort_step(self, plan: StepPlan, failure: Failure) -> StepItems:
        """Undoes a step in which the runner raised an error: its sequences lose their blocks and are computed again.

        Each of them is a suspect then, until a step with it has not failed. A suspect whose step fails again ends with
        `failure`. So no other sequence is lost with it.
        """
        work = self._workload
        moved = work.tables.written | work.tables.moving_out
        result = self._settle(plan, done=False)
        ran = {chunk.branch.sequence: None for chunk in plan.chunks}
        for sequence in {**ran, **dict.fromkeys(moved)}:
            if not self.is_here(sequence):
                continue
            if Hold.FAILED in sequence.holds and sequence in ran:
                result.items += work.end(sequence, FinishReason.ERROR, failure)
                continue
            work.send_back(sequence)
            if sequence in ran:
                work.hold(sequence, Hold.FAILED)
        self._check()
        return result

    def _settle(self, plan: StepPlan, *, done: bool) -> StepItems:
        """Ends the step in flight, then the branches and sequences whose end has waited for that."""
        self._require_in_flight(plan)
        self._in_flight = None
        self._inputs.end_step()
        work = self._workload
        work.tables.end_step(done=done)
        result = StepItems(plan.input.step_id, work.take_pending(), plan.num_branches, plan.num_tokens)
        branches, self._ending_branches = self._ending_branches, []
        for branch in branches:
            if branch.state is not FINISHED:
                work.finish(branch)
        ending, self._ending = self._ending, {}
        for sequence, reason in ending.items():
            if reason is FinishReason.NONE:
                work.drop(sequence)
            elif self.is_here(sequence):
                result.items += work.end(sequence, reason)
        return result

    # Blocks

    def swap(self, seq_id: SequenceId, epoch: int, operation: SwapOperation) -> int:
        """Moves a sequence's blocks to the host pool or back, or drops them. Returns how many; 0 if none had to move.

        The blocks are copied by the plan of `plan_moves`, or else by that of the next step. "out" holds the sequence,
        also one that waits and has no blocks: it does not run before "in" or "drop", or the end of all holds. Raises
        NotFound, StaleEpoch, OutOfBlocks if its blocks cannot move now, or InvalidArgument for "out" of a suspect:
        while that is on trial all others wait for it. Raises CannotMove for one that is frozen.
        """
        self._require_no_step("blocks move")
        work = self._workload
        sequence = work.find(seq_id, epoch)
        if sequence.place is Place.FROZEN:
            raise CannotMove(f"sequence {seq_id} is moving to another worker: swap it there", cause="frozen")
        if operation == "in":
            return self._planner.starter.bring_back(sequence)
        if operation == "out":
            if Hold.CRASHED in sequence.holds:
                message = f"sequence {seq_id} is a suspect, which others wait for: OUT after its trial, or DROP"
                raise InvalidArgument("operation", message)
            return self._planner.preemption.hold_out(sequence)
        work.end_hold(sequence, Hold.REQUESTED)
        return self._planner.preemption.recompute(sequence) if sequence.place is not Place.WAITING else 0

    def end_holds(self) -> None:
        """Lets every sequence that was swapped out on request come back in its turn."""
        for sequence in self._workload.sequences.values():
            self._workload.end_hold(sequence, Hold.REQUESTED)

    def end_wait(self, sequence: Sequence) -> None:
        """Lets a sequence start in its turn that was waiting for blocks of another worker, whether they came or not."""
        self._workload.end_hold(sequence, Hold.AWAITS_PREFIX)

    def plan_moves(self) -> StepPlan | None:
        """A plan of the copies that swaps have decided since the last step, and nothing else. None: there are none.

        `end_moves` has to follow, before anything else is asked.
        """
        self._require_no_step("blocks move")
        if not self._workload.tables.moves:
            return None
        plan = StepPlan(StepInput(self._num_steps, timed=True))
        self._workload.tables.add_moves(plan)
        self._in_flight = plan
        return plan

    def end_moves(self, plan: StepPlan, *, failed: bool = False) -> None:
        """Takes in that the copies are done. If they have `failed`, their sequences are computed again, none held."""
        if self._in_flight is not plan:
            raise RuntimeError("these moves are not in flight")
        self._in_flight = None
        work = self._workload
        moved = work.tables.written | work.tables.moving_out
        work.tables.end_step(done=not failed)
        if failed:
            for sequence in filter(self.is_here, moved):
                work.end_hold(sequence, Hold.REQUESTED)
                work.send_back(sequence)
        self._check()

    def _require_in_flight(self, plan: StepPlan) -> None:
        if self._in_flight is not plan:
            raise RuntimeError(f"step {plan.input.step_id} is not the one in flight")

    def _require_no_step(self, what: str) -> None:
        if self._in_flight is not None:
            raise RuntimeError(f"{what} between steps only")

    def _check(self) -> None:
        if self._workload.config.debug:
            self._workload.check_places()

    def check_state(self) -> None:
        """Recounts blocks, tables and lists from scratch; raises AssertionError with what is wrong."""
        if self._in_flight is None:
            self._workload.check_places()
