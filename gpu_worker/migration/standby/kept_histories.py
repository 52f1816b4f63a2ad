"""Which histories does this worker keep for others, how much of each is here, and what is to be fetched next?"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_worker.migration.calls.standby_calls import HistoryState, NamedHistory
from octavo.request.ids import BlockHash, Incarnation, SequenceId

KEEP_S = 20.0  # how long an owner's histories are kept after its last call: longer than it takes to recover them
# After so long they make room for those of owners that live: a dead owner's sequences run elsewhere by then, and have
# their blocks there.
SILENT_S = 6.0

BranchKey = tuple[SequenceId, int]


@dataclass(slots=True, eq=False)
class KeptHistory:
    """One history, as far as its owner has named it."""

    hashes: list[BlockHash] = field(default_factory=list)
    num_held: int = 0  # leading blocks that are here
    tail: BlockHash | None = None  # by what the block behind them is known, if it has come
    refused: bool = False  # there was no room: nothing of it is kept, and its owner is told
    stalled_until: float = 0.0

    @property
    def state(self) -> HistoryState:
        return HistoryState(len(self.hashes), self.num_held, self.refused)


@dataclass(slots=True, eq=False)
class OwnerHistories:
    """Those of one owner."""

    histories: dict[BranchKey, KeptHistory] = field(default_factory=dict)
    called_at: float = 0.0
    number: int = -1  # of its last call


class KeepChange(NamedTuple):
    """Hashes that are to be kept from now on, and those that are not any more, in the order of their prefixes.

    A hash that is in both has ended and begun again.
    """

    begun: list[BlockHash]
    ended: list[BlockHash]


class KeptHistories:
    """A table in memory: at most `most_blocks` different blocks and tails, which several histories may share."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._owners: dict[Incarnation, OwnerHistories] = {}
        self._uses: Counter[BlockHash] = Counter()

    @property
    def num_blocks(self) -> int:
        """Different blocks that are to be kept, whether they have come or not."""
        return len(self._uses)

    @property
    def num_histories(self) -> int:
        return sum(not each.refused for owner in self._owners.values() for each in owner.histories.values())

    @property
    def owners(self) -> list[Incarnation]:
        """Those that have histories here."""
        return [owner for owner, table in self._owners.items() if table.histories]

    def all(self) -> Iterator[KeptHistory]:
        for owner in self._owners.values():
            yield from owner.histories.values()

    def update(
        self, owner: Incarnation, number: int, named: Sequence[NamedHistory], now: float
    ) -> tuple[KeepChange, list[HistoryState]]:
        """Takes in a call of an owner. What it does not name has ended. A call that was overtaken changes nothing."""
        table = self._owners.setdefault(owner, OwnerHistories())
        if number <= table.number:
            nothing = KeptHistory()
            found = [table.histories.get((each.seq_id, each.branch), nothing) for each in named]
            return KeepChange([], []), [each.state for each in found]
        table.called_at, table.number = now, number
        before, table.histories = table.histories, {}
        change = KeepChange([], [])
        states = []
        for each in named:
            key = each.seq_id, each.branch
            kept = table.histories[key] = before.pop(key) if key in before else KeptHistory()
            self._extend(kept, each, change, now)
            states.append(kept.state)
        self._end(before.values(), change)
        return change, states

    def find(self, owner: Incarnation, number: int, key: BranchKey) -> KeptHistory | None:
        """A history of an owner. None also if a later call than `number` has come."""
        table = self._owners.get(owner)
        return table.histories.get(key) if table is not None and table.number == number else None

    def set_tail(self, kept: KeptHistory, tail: BlockHash) -> list[BlockHash]:
        """Gives a history another tail, or none without room. Returns the one before, if no other history has it."""
        change = KeepChange([], [])
        self.end_tail(kept, change)
        if tail in self._uses or len(self._uses) < self._most_blocks:
            kept.tail = tail
            self._uses[tail] += 1
        return change.ended

    def end_tail(self, kept: KeptHistory, change: KeepChange) -> None:
        tails, kept.tail = [] if kept.tail is None else [kept.tail], None
        self._end_uses(tails, change)

    def expire(self, now: float) -> KeepChange:
        """Ends the histories of owners that have not called for KEEP_S."""
        change = KeepChange([], [])
        self._end_silent(now - KEEP_S, change)
        return change

    def refuse(self, histories: Iterable[KeptHistory]) -> KeepChange:
        """Keeps nothing of these histories: there is no room for them."""
        change = KeepChange([], [])
        for kept in histories:
            self._refuse(kept, change)
        return change

    def lacking(self, owner: Incarnation, most: int, now: float) -> tuple[list[KeptHistory], list[BlockHash]]:
        """The next blocks to fetch from an owner, at most so many, and the histories that they belong to.

        Those that lack least come first: a stream that goes on is complete soon, whatever begins beside it.
        """
        table = self._owners.get(owner, OwnerHistories())
        behind = [
            each for each in table.histories.values() if each.num_held < len(each.hashes) and each.stalled_until <= now
        ]
        behind.sort(key=lambda each: len(each.hashes) - each.num_held)
        histories: list[KeptHistory] = []
        hashes: dict[BlockHash, None] = {}
        for kept in behind:
            if len(hashes) >= most:
                break
            histories.append(kept)
            hashes.update(dict.fromkeys(kept.hashes[kept.num_held : kept.num_held + most - len(hashes)]))
        return histories, list(hashes)

    def check_uses(self) -> None:
        """Recounts everything; raises AssertionError with what is wrong."""
        counted: Counter[BlockHash] = Counter()
        for kept in self.all():
            counted.update(kept.hashes)
            counted.update([] if kept.tail is None else [kept.tail])
            if kept.num_held > len(kept.hashes) or (kept.refused and kept.hashes):
                raise AssertionError("a history holds more than was named, or was refused and keeps blocks")
        if counted != self._uses or len(self._uses) > self._most_blocks:
            raise AssertionError("the uses of blocks are counted wrongly, or there are too many blocks")

    def _extend(self, kept: KeptHistory, named: NamedHistory, change: KeepChange, now: float) -> None:
        num_known = len(kept.hashes)
        if kept.refused or named.first > num_known:
            return  # the answer says where the next call is to begin
        further = named.hashes[num_known - named.first :]
        fresh = self._fresh(further)
        if len(self._uses) + len(fresh) > self._most_blocks:
            self._end_silent(now - SILENT_S, change)
            fresh = self._fresh(further)
        if len(self._uses) + len(fresh) > self._most_blocks:
            self._refuse(kept, change)
            return
        kept.hashes += further
        self._uses.update(further)
        change.begun.extend(fresh)

    def _fresh(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        return [each for each in hashes if each not in self._uses]

    def _end_silent(self, since: float, change: KeepChange) -> None:
        """Ends the histories of owners that have not called since then."""
        for owner in [owner for owner, table in self._owners.items() if table.called_at <= since]:
            self._end(self._owners.pop(owner).histories.values(), change)

    def _refuse(self, kept: KeptHistory, change: KeepChange) -> None:
        self._end([kept], change)
        kept.hashes, kept.num_held, kept.refused = [], 0, True

    def _end(self, histories: Iterable[KeptHistory], change: KeepChange) -> None:
        for kept in histories:
            self._end_uses(kept.hashes, change)
            self.end_tail(kept, change)

    def _end_uses(self, hashes: Iterable[BlockHash], change: KeepChange) -> None:
        for block_hash in hashes:
            self._uses[block_hash] -= 1
            if not self._uses[block_hash]:
                del self._uses[block_hash]
                change.ended.append(block_hash)
