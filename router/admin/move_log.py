"""The sequences that changed their owner lately, as their records tell.

A record says who has owned its sequence and since when. So a router notices each change that it finds in the record of
a live sequence, however short it was. It does not notice the changes of a sequence that ended before the router read
the record.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from octavo.request.ids import Incarnation, RequestId, SequenceId
from octavo.request.record import Record
from octavo.store.calls import TakeReason

MAX_MOVES = 50


class MoveReason(Enum):
    """Why a sequence has another owner."""

    MIGRATED = auto()  # it moved with its blocks
    TAKEN_OVER = auto()  # its owner was lost
    REPLACED = auto()  # its owner gave it back


@dataclass(frozen=True, slots=True)
class SeenMove:
    """One change of an owner. Workers are named; by their incarnations where the names are not known."""

    seq_id: SequenceId
    request_id: RequestId
    tenant: str
    reason: MoveReason
    source: str
    target: str
    at: float  # on the clock that `note_records` was told
    number: int  # one more for each move that was noticed
    seen: str  # of the worker that had it, in a few words; or nothing


class MoveLog:
    """The last moves, at most MAX_MOVES. `name_of` gives the name of a worker that this router has met, or nothing."""

    def __init__(self, name_of: Callable[[Incarnation], str]) -> None:
        self._name_of = name_of
        self._num_noticed = 0
        self._moves: OrderedDict[tuple[SequenceId, int, Incarnation], SeenMove] = OrderedDict()

    @property
    def moves(self) -> Sequence[SeenMove]:
        """The newest first."""
        return sorted(self._moves.values(), key=lambda move: -move.at)

    def note_records(self, records: Sequence[Record], now_ms: int, now: float) -> None:
        """Adds the moves of these sequences. `now_ms` is by the store's clock, as records are, and `now` by ours."""
        for record in records:
            for after_ms, reason, source, target, seen in owner_changes(record):
                key = record.seq_id, after_ms, target
                if key in self._moves:
                    continue
                self._num_noticed += 1
                self._moves[key] = SeenMove(
                    record.seq_id,
                    record.request_id,
                    record.tenant,
                    reason,
                    source=self._name_of(source) or source,
                    target=self._name_of(target) or target,
                    at=now - max(0, now_ms - record.accepted_ms - after_ms) / 1000,
                    number=self._num_noticed,
                    seen=seen,
                )
        oldest = sorted(self._moves, key=lambda key: self._moves[key].at)
        for key in oldest[: max(0, len(oldest) - MAX_MOVES)]:
            del self._moves[key]


def owner_changes(record: Record) -> Iterator[tuple[int, MoveReason, Incarnation, Incarnation, str]]:
    """When after its acceptance, why, from which worker and to which one the sequence has changed its owner, and what
    was seen of the first one."""
    owner, requeued = Incarnation(""), ""
    for after_ms, what, detail in record.timeline:
        if what == "requeued":
            _, _, requeued = detail.partition(" ")
        if what not in ("taken", "migrated"):
            continue
        name, why, seen = [*detail.split(" ", 2), "", ""][:3]
        seen, requeued = seen or requeued, ""
        source, owner = owner, Incarnation(name)
        if not source or source == owner:
            continue  # the first owner, or the same one again
        reason = MoveReason.MIGRATED if what == "migrated" else MoveReason.REPLACED
        if what == "taken" and why in (TakeReason.LEASE, TakeReason.CONNECTION):
            reason = MoveReason.TAKEN_OVER
        yield after_ms, reason, source, owner, seen
