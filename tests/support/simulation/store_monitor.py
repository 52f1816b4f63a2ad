"""What must hold of the store at every call."""

from collections.abc import Iterable
from typing import Any

from octavo.request.ids import Incarnation, SequenceId
from octavo.store.calls import AppendStatus
from octavo.store.memory import MemoryState

ACCEPTED = (AppendStatus.OK, AppendStatus.OK_CANCEL)


class StoreMonitor:
    """Sees every call that the store executes. What breaks an invariant is added to `violations`."""

    def __init__(self, state: MemoryState) -> None:
        self._state = state
        self._epochs: dict[SequenceId, int] = {}
        self._journals: dict[tuple[SequenceId, int], list[int]] = {}
        self.violations: list[str] = []
        self.num_refused = 0  # appends of an owner that is none any more

    def forget(self) -> None:
        """The store may have lost what it had before."""
        self._epochs.clear()
        self._journals.clear()

    def note_append(self, writer: Incarnation | None, items: Iterable[Any], replies: Iterable[Any]) -> None:
        for item, reply in zip(items, replies, strict=False):
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

    def _add(self, what: str) -> None:
        self.violations.append(what)
