"""Every sequence on this worker, and where it is.

A sequence is in `waiting` while it has branches to start, in `active` while one of its branches has blocks on the
device (it may be in both), and in `swapped` while its blocks are in the host pool. Its branches on the device are on
`BranchLists`, their blocks in `BlockTables`.

Queues change through the methods of this class only. What its properties return is to be read, and to be copied by a
caller that moves a sequence while it reads.
"""

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from collections.abc import Set as AbstractSet

from gpu_worker.scheduling.state.block_tables import BlockTables
from gpu_worker.scheduling.state.branch_lists import BranchLists
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import FINISHED, RUNNING, SWAPPED, WAITING, Branch, BranchState, Sequence
from gpu_worker.scheduling.state.step import RunnerInfo
from gpu_worker.scheduling.state.step_items import beam_items, branch_item
from gpu_worker.scheduling.state.wait_queue import WaitQueue, rank_of
from octavo.request.errors import Failure, NotFound, StaleEpoch
from octavo.request.ids import BlockId, HostBlockId, SequenceId
from octavo.request.sampling import FinishReason
from octavo.request.step_item import StepItem


class Workload:
    """Moves sequences and branches, so that queues, branch lists and block tables always agree."""

    def __init__(self, config: SchedulerConfig, info: RunnerInfo) -> None:
        self.config = config
        self.info = info
        self.tables = BlockTables(config, info)
        self.lists = BranchLists()
        self._sequences: dict[SequenceId, Sequence] = {}
        self._num_added = 0
        self._waiting = WaitQueue()
        self._swapped = WaitQueue()
        self._active: dict[Sequence, None] = {}
        self._loners: list[Sequence] = []
        self._frozen: set[Sequence] = set()
        self._reserved_for: Sequence | None = None
        self._trial_begun = False
        self._pending: list[StepItem] = []
        self._num_preempted_swap = 0
        self._num_preempted_recompute = 0

    # To be read

    @property
    def sequences(self) -> Mapping[SequenceId, Sequence]:
        """All sequences that are here and have not ended."""
        return self._sequences

    @property
    def waiting(self) -> SequenceOf[Sequence]:
        """The sequences with branches to start, in queue order."""
        return self._waiting.sequences

    @property
    def swapped(self) -> SequenceOf[Sequence]:
        """The sequences with blocks in the host pool, in queue order."""
        return self._swapped.sequences

    @property
    def active(self) -> Collection[Sequence]:
        """The sequences with blocks on the device."""
        return self._active.keys()

    @property
    def loners(self) -> SequenceOf[Sequence]:
        """The sequences that run alone: no other sequence is in a step of theirs."""
        return self._loners

    @property
    def frozen(self) -> AbstractSet[Sequence]:
        """The sequences that keep their blocks and do not run."""
        return self._frozen

    @property
    def pauses(self) -> bool:
        """Whether some sequences on the device are not in every step."""
        return bool(self._loners or self._frozen)

    @property
    def reserved_for(self) -> Sequence | None:
        """The suspect for which all steps are, although it may have ended: other sequences pause."""
        return self._reserved_for

    @property
    def on_trial(self) -> Sequence | None:
        """The suspect that has the steps to itself, once its trial has begun."""
        return self._reserved_for if self._trial_begun else None

    @property
    def pending(self) -> SequenceOf[StepItem]:
        """The items of what happened between steps. The result of the next step has them."""
        return self._pending

    @property
    def num_preempted_swap(self) -> int:
        return self._num_preempted_swap

    @property
    def num_preempted_recompute(self) -> int:
        return self._num_preempted_recompute

    def find(self, seq_id: SequenceId, epoch: int) -> Sequence:
        """The sequence that is here at this epoch. Raises NotFound or StaleEpoch."""
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            raise NotFound(f"sequence {seq_id} is not on this worker", resource="sequence", name=seq_id)
        if sequence.epoch != epoch:
            raise stale_epoch(sequence, epoch)
        return sequence

    # Sequences come and go

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence, in order after all that came before. `enqueue` still has to put it into the queue."""
        sequence.order = self._num_added
        sequence.rank = rank_of(sequence, self.config.policy)
        self._num_added += 1
        self._sequences[sequence.seq_id] = sequence
        if sequence.runs_alone:
            self._loners.append(sequence)

    def disown(self, sequence: Sequence) -> None:
        """Takes the sequence out of `sequences`. It keeps its blocks until `drop`."""
        del self._sequences[sequence.seq_id]

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence and its blocks out of everything, without an item."""
        for branch in sequence.branches:
            if branch.state is not FINISHED:
                self.stop(branch, FINISHED)
        self._forget(sequence)
        self.lists.tidy()

    def end(self, sequence: Sequence, reason: FinishReason, failure: Failure | None = None) -> list[StepItem]:
        """Ends all branches that have not finished, with the tokens they have. Returns the sequence's last items."""
        if sequence.search is not None:
            items = beam_items(sequence, reason, failure)
        else:
            going = [branch for branch in sequence.branches if branch.state is not FINISHED]
            items = [branch_item(branch, (), reason, failure) for branch in going]
        for branch in sequence.branches:
            if branch.state is not FINISHED:
                self.finish(branch)
        self.lists.tidy()
        return items

    def isolate(self, sequence: Sequence) -> None:
        """Has a sequence of a failed step run alone, until a step with it has not failed."""
        sequence.isolated = True
        if sequence not in self._loners:
            self._loners.append(sequence)

    def rejoin(self, sequence: Sequence) -> None:
        """Lets an isolated sequence share steps again after one that did not fail, unless it was admitted alone."""
        sequence.isolated = False
        if not sequence.alone:
            self._loners.remove(sequence)

    def freeze(self, sequence: Sequence) -> None:
        """Lets a sequence with blocks on the device keep them and not run, until `thaw` or its end."""
        sequence.frozen = True
        self._frozen.add(sequence)

    def thaw(self, sequence: Sequence) -> None:
        """Lets a frozen sequence run again."""
        sequence.frozen = False
        self._frozen.discard(sequence)

    # Trials

    def reserve_steps(self, sequence: Sequence) -> None:
        """Keeps the steps from now on for a suspect, which does not run before `begin_trial` either."""
        self._reserved_for, self._trial_begun = sequence, False

    def begin_trial(self) -> None:
        """Lets the suspect run for which the steps are reserved."""
        self._trial_begun = True

    def end_trial(self, sequence: Sequence) -> None:
        """Lets the suspect share steps with all others from now on, wherever it is by now."""
        self._reserved_for, self._trial_begun = None, False
        sequence.alone = False
        if sequence in self._loners and not sequence.isolated:
            self._loners.remove(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Takes a sequence whose branches have all ended out of every queue and table."""
        self.dequeue(sequence)
        if self._sequences.get(sequence.seq_id) is sequence:
            del self._sequences[sequence.seq_id]
        self._leave_swapped(sequence)
        self._active.pop(sequence, None)
        self.tables.forget(sequence)
        self.thaw(sequence)
        if sequence in self._loners:
            self._loners.remove(sequence)

    # Sequences change places

    def enqueue(self, sequence: Sequence) -> None:
        """Puts a sequence that has branches to start into the waiting queue."""
        if not sequence.queued:
            sequence.queued = True
            self._waiting.add(sequence)

    def dequeue(self, sequence: Sequence) -> None:
        """Takes a sequence that has no more branches to start out of the waiting queue."""
        if sequence.queued:
            sequence.queued = False
            self._waiting.remove(sequence)

    def move_out(self, sequence: Sequence) -> None:
        """Moves the sequence's running branches to the host pool. Raises OutOfBlocks if they do not fit there."""
        branches = [branch for branch in sequence.branches if branch.state is RUNNING]
        self.tables.move_out(sequence, branches)
        for branch in branches:
            branch.state = SWAPPED
        self._active.pop(sequence, None)
        sequence.swapped = True
        self._swapped.add(sequence)
        self.lists.tidy()

    def move_in(self, sequence: Sequence, places: dict[HostBlockId, BlockId | None]) -> None:
        """Moves its swapped branches to the device: to `places` and to new blocks. There must be room."""
        branches = [branch for branch in sequence.branches if branch.state is SWAPPED]
        self.tables.move_in(sequence, branches, places)
        for branch in branches:
            self.run(branch)
        self._leave_swapped(sequence)

    def send_back(self, sequence: Sequence) -> None:
        """Takes all blocks from the sequence and keeps its tokens: it waits, and is computed again."""
        for branch in sequence.branches:
            if branch.state in (RUNNING, SWAPPED):
                self.stop(branch, WAITING)
        self._leave_swapped(sequence)
        self.enqueue(sequence)
        self.lists.tidy()

    def send_branch_back(self, branch: Branch) -> None:
        """Takes all blocks from one branch and keeps its tokens: it waits, and the sequence's other branches go on."""
        self.stop(branch, WAITING)
        self.enqueue(branch.sequence)
        self.lists.tidy()

    def count_preemption(self, *, swapped: bool) -> None:
        if swapped:
            self._num_preempted_swap += 1
        else:
            self._num_preempted_recompute += 1

    def _leave_swapped(self, sequence: Sequence) -> None:
        if sequence.swapped:
            sequence.swapped = False
            self._swapped.remove(sequence)

    # Branches

    def run(self, branch: Branch) -> None:
        """Makes a branch that has its blocks RUNNING, and puts it on the list from which its next step is planned."""
        branch.state = RUNNING
        self._active[branch.sequence] = None
        self.lists.add(branch)

    def fork(self, parent: Branch, child: Branch) -> None:
        """Gives the child the parent's computed blocks. The caller puts the child on a branch list."""
        child.state = RUNNING
        self.tables.fork_table(parent, child)

    def stop(self, branch: Branch, state: BranchState) -> None:
        """Takes all blocks from the branch and sets its state. The caller tidies the branch lists afterwards."""
        self.tables.release(branch)
        branch.state = state
        if not any(other.state is RUNNING for other in branch.sequence.branches):
            self._active.pop(branch.sequence, None)

    def finish(self, branch: Branch) -> None:
        """Ends a branch and, with the last one, its sequence. The caller makes the item, and tidies the lists."""
        self.stop(branch, FINISHED)
        if branch.sequence.finished:
            self._forget(branch.sequence)

    # Between steps

    def report(self, items: Iterable[StepItem]) -> None:
        """Keeps items of what happened between steps for the next step's result."""
        self._pending += items

    def take_pending(self) -> list[StepItem]:
        """The items reported since the last call."""
        pending, self._pending = self._pending, []
        return pending

    def discard_pending(self, seq_id: SequenceId) -> None:
        """Forgets the pending items of a sequence that has another owner."""
        self._pending = [item for item in self._pending if item.seq_id != seq_id]

    def check_places(self) -> None:
        """Recounts blocks, lists and queues from the sequences; raises AssertionError with what is wrong."""
        branches = [branch for sequence in self._sequences.values() for branch in sequence.branches]
        running = {branch for branch in branches if branch.state is RUNNING}
        self.tables.check_tables(branches)
        self.lists.check_lists(running)
        needy = set(self.lists.needy)
        problems = {
            "a branch has blocks in the wrong place": any(
                bool(b.blocks) > (b.state is RUNNING) or bool(b.host_blocks) != (b.state is SWAPPED) for b in branches
            ),
            "a branch keeps blocks that it has passed, or has given back others": any(
                b.num_passed != self.tables.num_passed(b.num_computed) for b in branches
            ),
            "active is not the sequences that run": set(self._active) != {branch.sequence for branch in running},
            "a frozen sequence has lost blocks": any(
                s not in self._active or not s.frozen or s.queued or s.swapped for s in self._frozen
            ),
            "a decode has no slot of its own": any(
                chunk.branch not in needy and not self.tables.has_own_slot(chunk.branch) for chunk in self.lists.decodes
            ),
            "a waiting branch is not queued": any(
                b.state is WAITING and not b.sequence.queued and not b.sequence.fan_out for b in branches
            ),
        }
        for problem, found in problems.items():
            if found:
                raise AssertionError(problem)


def stale_epoch(sequence: Sequence, epoch: int) -> StaleEpoch:
    """The error for a sequence that is here at another epoch than `epoch`."""
    return StaleEpoch(f"sequence {sequence.seq_id} runs here at epoch {sequence.epoch}, not {epoch}")
