"""Every sequence on this worker, and where it is: `Sequence.place` and `Sequence.holds` change here.

    waiting      sequences with branches to start, by rank
    active       sequences with blocks on the device; one that is STARTING is in `waiting`, too
    frozen       those of them that keep their blocks and do not run
    swapped      sequences with blocks in the host pool, by rank
    suspects     sequences that are by themselves in their steps

Its branches on the device are on `BranchLists`, their blocks in `BlockTables`. All of these are for reading, and to be
copied by a caller that moves a sequence while it reads.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter

from gpu_worker.blocks.prefix_cache import raise_first
from gpu_worker.drafting.recent_outputs import RecentOutputs
from gpu_worker.scheduling.state.block_tables import BlockTables
from gpu_worker.scheduling.state.branch_lists import BranchLists
from gpu_worker.scheduling.state.scheduler_config import SchedulerConfig
from gpu_worker.scheduling.state.sequence import (
    FINISHED,
    ON_DEVICE,
    QUEUED,
    RUNNING,
    SWAPPED,
    WAITING,
    Branch,
    BranchState,
    Hold,
    Place,
    Sequence,
    check_holds,
)
from gpu_worker.scheduling.state.step import beam_items, branch_item
from gpu_worker.steps.runner import RunnerInfo
from octavo.request.errors import Failure, NotFound, StaleEpoch
from octavo.request.ids import BlockId, HostBlockId, SequenceId
from octavo.request.sampling import FinishReason
from octavo.request.step_item import StepItem

_rank = attrgetter("rank")


class WaitQueue(list[Sequence]):
    """Sequences by their ranks."""

    def add(self, sequence: Sequence) -> None:
        insort(self, sequence, key=_rank)


class Workload:
    """Moves sequences and branches, so that queues, branch lists and block tables always agree."""

    def __init__(self, config: SchedulerConfig, info: RunnerInfo) -> None:
        self.config = config
        self.info = info
        self.tables = BlockTables(config, info)
        self.lists = BranchLists()
        self.now = 0.0  # when the step being planned began to be planned
        self.turn: Sequence | None = None  # the suspect for which the step being planned is; None: it is for all others
        self.sequences: dict[SequenceId, Sequence] = {}  # that are here and have not ended
        self.waiting = WaitQueue()
        self.swapped = WaitQueue()
        self.active: set[Sequence] = set()
        self.frozen: set[Sequence] = set()
        self.suspects: list[Sequence] = []
        self.reserved_for: Sequence | None = None  # all steps are for this suspect, although it may have ended
        self.on_trial: Sequence | None = None  # the same, once its trial has begun
        self.pending: list[StepItem] = []  # of what happened between steps, for the result of the next step
        self.larger_limit = 0  # tokens that a branch may have on the largest other worker, as far as is known
        self.outgrown: set[Sequence] = set()  # that go on only there: whoever hands sequences over takes them out
        self.num_preempted_swap = 0
        self.num_preempted_recompute = 0
        self.num_decodes = 0  # how often a step has brought a branch its next token
        self.num_drafts: Counter[str] = Counter()  # tokens, by drafter
        self.num_accepted_drafts: Counter[str] = Counter()
        self.recent = RecentOutputs() if config.speculation == "recent" else None
        self._num_added = 0
        self._homes = (
            (self.waiting, QUEUED),
            (self.active, ON_DEVICE),
            (self.frozen, frozenset({Place.FROZEN})),
            (self.swapped, frozenset({Place.SWAPPED})),
        )

    @property
    def leaves_out(self) -> bool:
        """Whether some sequences on the device are not in every step."""
        return bool(self.suspects or self.frozen)

    @property
    def has_starved(self) -> bool:
        """Whether a suspect has found no room for its turn: nobody else starts before it."""
        return any(Hold.STARVED in suspect.holds for suspect in self.suspects)

    def may_run(self, sequence: Sequence) -> bool:
        """Whether the sequence may be in the step being planned."""
        if sequence.place is Place.FROZEN:
            return False
        return sequence is self.turn if self.turn is not None else not sequence.is_suspect

    def find(self, seq_id: SequenceId, epoch: int) -> Sequence:
        """The sequence that is here at this epoch. Raises NotFound or StaleEpoch."""
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            raise NotFound(f"sequence {seq_id} is not on this worker", resource="sequence", name=seq_id)
        if sequence.epoch != epoch:
            raise stale_epoch(sequence, epoch)
        return sequence

    def adapters_in_use(self) -> set[int]:
        """The numbers of the adapters of sequences that are here, whether they run or wait."""
        return {sequence.adapter for sequence in self.sequences.values()}

    def pictures_in_use(self) -> set[str]:
        """The digests of the pictures of sequences that are here, whether they run or wait."""
        return {picture.digest for sequence in self.sequences.values() for picture in sequence.pictures}

    # Sequences come and go

    def add(self, sequence: Sequence) -> None:
        """Takes in a sequence that waits, in order after all that came before."""
        sequence.order = self._num_added
        sequence.rank = (sequence.priority if self.config.policy == "priority" else 0, sequence.order)
        self._num_added += 1
        self.sequences[sequence.seq_id] = sequence
        self.hold(sequence)
        self._update_place(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Takes a sequence and its blocks out of everything, without an item."""
        for branch in sequence.branches:
            if branch.state is not FINISHED:
                self._stop(branch, FINISHED)
        self._update_place(sequence)

    def end(self, sequence: Sequence, reason: FinishReason, failure: Failure | None = None) -> list[StepItem]:
        """Ends all branches that have not finished, with the tokens they have. Returns the sequence's last items."""
        items: list[StepItem] = []
        if sequence.pooling is not None:
            sequence.pooling.end_without(reason, failure)
        elif sequence.search is not None:
            items = beam_items(sequence, reason, failure)
        else:
            going = [branch for branch in sequence.branches if branch.state is not FINISHED]
            items = [branch_item(branch, (), reason, failure) for branch in going]
        self.drop(sequence)
        return items

    def hand_to_larger(self, sequence: Sequence) -> bool:
        """Whether a sequence for which the memory here is too small goes on elsewhere: a larger worker can hold it.

        It must be too large to be admitted here again. A beam search is not: its beams begin anew.
        """
        longest = max(len(branch.tokens) for branch in sequence.branches)
        outgrown = self.tables.num_missing(longest, 0, 0) > self.info.num_blocks
        if sequence.search is not None or sequence.pooling is not None or not outgrown or longest >= self.larger_limit:
            return False
        self.outgrown.add(sequence)
        return True

    def hold(self, sequence: Sequence, *holds: Hold) -> None:
        sequence.holds.update(holds)
        if sequence.is_suspect and sequence not in self.suspects:
            self.suspects.append(sequence)

    def end_hold(self, sequence: Sequence, *holds: Hold) -> None:
        """A suspect that is none any more shares steps again."""
        sequence.holds.difference_update(holds)
        if not sequence.is_suspect:
            sequence.holds.discard(Hold.STARVED)
            if sequence in self.suspects:
                self.suspects.remove(sequence)

    def freeze(self, sequence: Sequence) -> None:
        """Lets a RUNNING sequence keep its blocks and be in no step, until `thaw` or its end. May be repeated."""
        self._go_to(sequence, Place.FROZEN)

    def thaw(self, sequence: Sequence) -> None:
        """Lets a sequence run again if it is frozen."""
        if sequence.place is Place.FROZEN:
            self._go_to(sequence, Place.RUNNING)

    # Sequences change places

    def _update_place(self, sequence: Sequence) -> None:
        self._go_to(sequence, sequence.find_place())

    def _go_to(self, sequence: Sequence, place: Place) -> None:
        before, sequence.place = sequence.place, place
        if before is place is not Place.ABSENT:
            return
        for home, places in self._homes:
            if before in places and place not in places:
                home.remove(sequence)
            elif place in places and before not in places:
                home.add(sequence)
        sequence.holds.discard(Hold.STARVED)
        if place is Place.ABSENT:
            if self.sequences.get(sequence.seq_id) is sequence:
                del self.sequences[sequence.seq_id]
            if sequence in self.suspects:
                self.suspects.remove(sequence)
            self.tables.forget(sequence)
            if sequence.pooling is not None:
                sequence.pooling.end_without(FinishReason.CANCELLED)

    def move_out(self, sequence: Sequence) -> None:
        """Moves the sequence's running branches to the host pool. Raises OutOfBlocks if they do not fit there."""
        branches = [branch for branch in sequence.branches if branch.state is RUNNING]
        self.tables.move_out(sequence, branches)
        for branch in branches:
            branch.state = SWAPPED
        self.lists.note_stop()
        self._update_place(sequence)

    def move_in(self, sequence: Sequence, destinations: dict[HostBlockId, BlockId | None]) -> None:
        """Moves its swapped branches to the device: to `destinations` and to new blocks. There must be room."""
        branches = [branch for branch in sequence.branches if branch.state is SWAPPED]
        self.tables.move_in(sequence, branches, destinations)
        for branch in branches:
            self.lists.add(branch)
            branch.state = RUNNING
        self._update_place(sequence)

    def send_back(self, sequence: Sequence) -> None:
        """Takes all blocks from the sequence and keeps its tokens: it waits, and is computed again."""
        for branch in sequence.branches:
            if branch.state in (RUNNING, SWAPPED):
                self._stop(branch, WAITING)
        self._update_place(sequence)

    def send_branch_back(self, branch: Branch) -> None:
        """Takes all blocks from one branch and keeps its tokens: it waits, and the sequence's other branches go on."""
        self._stop(branch, WAITING)
        self._update_place(branch.sequence)

    # Branches

    def run(self, branch: Branch) -> None:
        """Makes a branch that has its blocks RUNNING, and puts it on the list from which its next step is planned."""
        self.lists.add(branch)
        branch.state = RUNNING
        self._update_place(branch.sequence)

    def fork(self, parent: Branch, child: Branch) -> None:
        """Gives the child the parent's computed blocks. The caller puts the child on a branch list."""
        child.state = RUNNING
        self.tables.fork_table(parent, child)

    def finish(self, *branches: Branch) -> None:
        """Ends branches of a sequence and, with its last one, the sequence. The caller makes the items."""
        for branch in branches:
            self._stop(branch, FINISHED)
        self._update_place(branches[0].sequence)

    def _stop(self, branch: Branch, state: BranchState) -> None:
        self.tables.release(branch)
        branch.state = state
        if state is FINISHED and self.recent is not None and branch.sequence.search is None:
            self.recent.add(branch.sequence.root, branch.tokens, branch.num_prompt)
        self.lists.note_stop()

    # Between steps

    def report(self, items: Iterable[StepItem]) -> None:
        """Keeps items of what happened between steps for the next step's result."""
        self.pending += items

    def take_pending(self) -> list[StepItem]:
        """The items reported since the last call."""
        pending, self.pending = self.pending, []
        return pending

    def discard_pending(self, seq_id: SequenceId) -> None:
        """Forgets the pending items of a sequence that has another owner."""
        self.pending = [item for item in self.pending if item.seq_id != seq_id]

    def check_places(self) -> None:
        """Recounts blocks, lists and places from the sequences; raises AssertionError with what is wrong."""
        sequences = self.sequences.values()
        branches = [branch for sequence in sequences for branch in sequence.branches]
        self.tables.check_tables(branches)
        self.lists.check_lists({branch for branch in branches if branch.state is RUNNING})
        for sequence in sequences:
            check_holds(sequence.place, sequence.holds)
        needy = set(self.lists.needy)
        problems = {
            "a branch has blocks in the wrong place": any(
                bool(b.blocks) > (b.state is RUNNING) or bool(b.host_blocks) != (b.state is SWAPPED) for b in branches
            ),
            "a branch keeps blocks that it has passed, or has given back others": any(
                b.num_passed != self.tables.num_passed(b.num_computed) for b in branches
            ),
            "a sequence is not where its branches are": any(s.place is not s.find_place() for s in sequences),
            "a queue has not the sequences of its places": any(
                sorted(home, key=_rank) != sorted((s for s in sequences if s.place in places), key=_rank)
                for home, places in self._homes
            ),
            "a suspect is not listed, or another one is": set(self.suspects) != {s for s in sequences if s.is_suspect},
            "a decode has no slot of its own": any(
                chunk.branch not in needy and not self.tables.has_own_slot(chunk.branch) for chunk in self.lists.decodes
            ),
        }
        raise_first(problems.items())


def stale_epoch(sequence: Sequence, epoch: int) -> StaleEpoch:
    """The error for a sequence that is here at another epoch than `epoch`."""
    return StaleEpoch(f"sequence {sequence.seq_id} runs here at epoch {sequence.epoch}, not {epoch}")
