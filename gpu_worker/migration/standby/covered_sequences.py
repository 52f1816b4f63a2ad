"""Which sequences of this worker have a buddy, and how much of their histories is there?"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from gpu_worker.migration.calls.standby_calls import HistoryState, NamedHistory
from gpu_worker.scheduling.standby_blocks import HistoryKey
from octavo.request.ids import BlockHash, Incarnation, SequenceId

MOST_SEQUENCES = 512  # that have a buddy; of more, those that were there first
ALMOST_ALL = 4  # a tail is sent where the buddy lacked so many blocks before it by its last answer: they are coming


@dataclass(slots=True, eq=False)
class CoveredBranch:
    """What one branch has sealed, and what the buddy has of it."""

    hashes: list[BlockHash] = field(default_factory=list)
    num_named: int = 0  # that the buddy knows
    num_held: int = 0  # that it has
    tail: tuple[int, int] = (0, 0)  # what it was sent of the block behind them: after how many, how many tokens
    tail_at: float = float("-inf")  # when it was last asked for a tail, whether there was one or not


@dataclass(slots=True, eq=False)
class CoveredSequence:
    """One sequence at one epoch. All branches have the same buddy."""

    buddy: Incarnation | None = None
    branches: dict[int, CoveredBranch] = field(default_factory=dict)

    @property
    def num_blocks(self) -> int:
        return sum(len(branch.hashes) for branch in self.branches.values())

    def choose(self, buddy: Incarnation | None) -> None:
        """Gives the sequence a buddy, which knows nothing of it, or none."""
        self.buddy = buddy
        for branch in self.branches.values():
            branch.num_named = branch.num_held = 0
            branch.tail = 0, 0


class CoveredSequences:
    """A table in memory. Nothing is lost with it but the time of replays."""

    def __init__(self) -> None:
        self._sequences: dict[tuple[SequenceId, int], CoveredSequence] = {}
        self._left: set[Incarnation] = set()  # buddies whose sequences have ended since they were told last

    def known(self) -> dict[HistoryKey, int]:
        """How many hashes of each history are here."""
        return {
            HistoryKey(seq_id, epoch, index): len(branch.hashes)
            for (seq_id, epoch), sequence in self._sequences.items()
            for index, branch in sequence.branches.items()
        }

    def update(self, found: Mapping[HistoryKey, list[BlockHash]]) -> None:
        """Adds hashes that have been sealed since. A history that was not found has ended here."""
        for key, hashes in found.items():
            name = key.seq_id, key.epoch
            sequence = self._sequences.get(name)
            if sequence is None:
                if len(self._sequences) >= MOST_SEQUENCES:
                    continue
                sequence = self._sequences[name] = CoveredSequence()
            sequence.branches.setdefault(key.branch, CoveredBranch()).hashes.extend(hashes)
        for (seq_id, epoch), sequence in list(self._sequences.items()):
            for index in [i for i in sequence.branches if HistoryKey(seq_id, epoch, i) not in found]:
                del sequence.branches[index]
                if sequence.buddy is not None:
                    self._left.add(sequence.buddy)
            if not sequence.branches:
                del self._sequences[seq_id, epoch]

    def without_buddy(self) -> list[CoveredSequence]:
        """Those that have sealed blocks and no buddy."""
        return [each for each in self._sequences.values() if each.buddy is None and each.num_blocks]

    def leave(self, gone: Collection[Incarnation]) -> None:
        """These workers are no buddies any more."""
        for sequence in self._sequences.values():
            if sequence.buddy in gone:
                sequence.choose(None)

    def num_blocks_by_buddy(self) -> Counter[Incarnation]:
        counts: Counter[Incarnation] = Counter()
        for sequence in self._sequences.values():
            if sequence.buddy is not None:
                counts[sequence.buddy] += sequence.num_blocks
        return counts

    def has_news(self, buddy: Incarnation) -> bool:
        """Whether something has been sealed, or has ended, that the buddy does not know of."""
        return buddy in self._left or any(
            branch.num_named < len(branch.hashes)
            for sequence in self._sequences.values()
            if sequence.buddy == buddy
            for branch in sequence.branches.values()
        )

    def next_tail(self, buddy: Incarnation) -> tuple[HistoryKey, CoveredBranch] | None:
        """Of the histories that a buddy has almost all blocks of, the one that was asked for a tail the longest ago."""
        found = [
            (HistoryKey(seq_id, epoch, index), branch)
            for (seq_id, epoch), sequence in self._sequences.items()
            if sequence.buddy == buddy
            for index, branch in sequence.branches.items()
            if branch.num_held >= max(1, len(branch.hashes) - ALMOST_ALL)
        ]
        return min(found, key=lambda each: each[1].tail_at, default=None)

    def named(self, buddy: Incarnation, most: int) -> list[tuple[NamedHistory, CoveredBranch, CoveredSequence]]:
        """All histories of a buddy, with hashes that it does not know: at most so many in all."""
        self._left.discard(buddy)
        histories = []
        for (seq_id, _), sequence in self._sequences.items():
            for index, branch in sequence.branches.items() if sequence.buddy == buddy else ():
                hashes = branch.hashes[branch.num_named : branch.num_named + most]
                most -= len(hashes)
                histories.append((NamedHistory(seq_id, index, branch.num_named, hashes), branch, sequence))
        return histories

    @property
    def num_histories(self) -> int:
        return sum(len(each.branches) for each in self._sequences.values())

    @property
    def num_covered(self) -> int:
        """Sequences with a buddy that has blocks of them."""
        return sum(any(b.num_held for b in each.branches.values()) for each in self._sequences.values())

    @property
    def num_sealed_blocks(self) -> int:
        """Blocks of histories that are to have a standby."""
        return sum(each.num_blocks for each in self._sequences.values())

    @property
    def num_held_blocks(self) -> int:
        """Of these, blocks that buddies have."""
        branches = (branch for each in self._sequences.values() for branch in each.branches.values())
        return sum(branch.num_held for branch in branches)


def note_state(branch: CoveredBranch, state: HistoryState) -> None:
    """What a buddy has answered for a branch."""
    branch.num_named = min(state.num_named, len(branch.hashes))
    branch.num_held = min(state.num_held, len(branch.hashes))
