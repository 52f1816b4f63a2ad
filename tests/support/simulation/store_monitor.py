"""What must hold of the store at every call."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.sampling import FinishReason, Shape
from octavo.store.calls import AppendStatus, MigrateStatus, TakeReason, TakeRequest, TakeStatus
from octavo.store.memory import MemoryState
from octavo.wire.public import sampling_from_bytes

GOES_ON, MOVES_TO_BUDDY = "buddy goes on", "sequence moved to its buddy"
ACCEPTED = (AppendStatus.OK, AppendStatus.OK_CANCEL)


class StoreMonitor:
    """Sees every call that the store executes. What breaks an invariant is added to `violations`."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state
        self._epochs: dict[SequenceId, int] = {}
        self._journals: dict[tuple[SequenceId, int], list[int]] = {}
        self.violations: list[str] = []
        self.num_refused = 0  # appends of an owner that is none any more
        self.inside_json: Counter[str] = Counter()  # changes of owner in the midst of JSON
        self.to_buddies: Counter[str] = Counter()  # changes of owner to one that keeps blocks of the sequence
        self.is_buddy: Callable[[Incarnation, SequenceId], bool] = lambda worker, seq_id: False
        self._made_owner: defaultdict[tuple[SequenceId, int], set[Incarnation]] = defaultdict(set)  # of each epoch

    def forget(self) -> None:
        """The store may have lost what it had before."""
        self._epochs.clear()
        self._journals.clear()

    def note_append(self, writer: Incarnation | None, items: Iterable[Any], replies: Iterable[Any]) -> None:
        for item, reply in zip(items, replies, strict=False):
            if writer is not None and writer not in self._made_owner[item.seq_id, item.epoch]:
                self._add(f"{item.seq_id}: {writer} sends tokens of epoch {item.epoch}, without the store's word")
            if reply.status not in ACCEPTED:
                self.num_refused += reply.status is AppendStatus.FENCED
                continue
            stored = self._state.get(item.seq_id)
            record, journal = stored.record, stored.journals[item.branch]
            if record.epoch != item.epoch:
                self._add(f"{item.seq_id}: tokens of epoch {item.epoch} accepted at epoch {record.epoch}")
            if writer is not None and not record.state.ended and record.owner != writer:
                self._add(f"{item.seq_id}: tokens of {writer} accepted, but {record.owner} is the owner")
            key = (item.seq_id, item.branch)
            if journal[: len(self._journals.get(key, ()))] != self._journals.get(key, []):
                self._add(f"{item.seq_id}: the journal of branch {item.branch} has changed")
            if len(journal) > record.max_tokens:
                self._add(f"{item.seq_id}: {len(journal)} tokens, and {record.max_tokens} are allowed")
            if record.epoch < self._epochs.get(item.seq_id, 0):
                self._add(f"{item.seq_id}: the epoch has fallen to {record.epoch}")
            self._journals[key] = list(journal)
            self._epochs[item.seq_id] = record.epoch

    def note_take(self, request: TakeRequest, status: TakeStatus) -> None:
        is_lost = request.reason in (TakeReason.LEASE, TakeReason.CONNECTION)
        if status in (TakeStatus.OK, TakeStatus.SAME):
            self._made_owner[request.seq_id, request.expected_epoch + 1].add(request.new_owner)
        if status is TakeStatus.OK and self._is_inside_json(request.seq_id):
            self.inside_json["owner lost" if is_lost else "given up and taken again"] += 1
        if status is TakeStatus.OK and is_lost and self.is_buddy(request.new_owner, request.seq_id):
            self.to_buddies[GOES_ON] += 1

    def note_commit(self, seq_id: SequenceId, epoch: int, target: Incarnation, status: MigrateStatus) -> None:
        if status in (MigrateStatus.OK, MigrateStatus.SAME):
            self._made_owner[seq_id, epoch + 1].add(target)
        if status is MigrateStatus.OK and self._is_inside_json(seq_id):
            self.inside_json["moved with its blocks"] += 1
        if status is MigrateStatus.OK and self.is_buddy(target, seq_id):
            self.to_buddies[MOVES_TO_BUDDY] += 1

    def _is_inside_json(self, seq_id: SequenceId) -> bool:
        """Whether a branch whose form is JSON has begun and has not ended."""
        stored = self._state.get(seq_id)
        if stored is None:
            return False
        constraint = sampling_from_bytes(stored.record.sampling).constraint
        begun = [bool(journal) for journal in stored.journals]
        runs = [finish is FinishReason.NONE for finish in stored.record.finishes]
        is_json = constraint is not None and constraint.shape in (Shape.JSON_SCHEMA, Shape.JSON_OBJECT)
        return is_json and any(map(all, zip(begun, runs, strict=True)))

    def _add(self, what: str) -> None:
        self.violations.append(what)
