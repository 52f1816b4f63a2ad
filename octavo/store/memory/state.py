"""The state behind MemoryStore: what the functions' library keeps in keys, as plain values, and how a sequence ends."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from octavo.ids import Incarnation, SequenceId
from octavo.record import Record, State
from octavo.sampling import FinishReason
from octavo.store.calls import Finish, Notice, QueueDepth

ALIVE_MS = 24 * 3600 * 1000
CHECK_MS = 1000
QUARANTINE_MS = 60_000
MAX_TIMELINE = 32


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(slots=True, kw_only=True)
class Entry:
    """A record with its prompt and journals. The record's `num_tokens` and `final_lengths` are filled in on reading."""

    record: Record
    prompt: tuple[int, ...]
    journals: list[list[int]]
    cost: int
    place: int  # in the queue
    expires_ms: int
    proof: int = 0  # tokens journalled since the last take
    cuts: dict[int, int] = field(default_factory=dict)  # branch: delivered length, where a stop string cut

    def snapshot(self) -> Record:
        lengths = tuple(len(journal) for journal in self.journals)
        finals = tuple(self.cuts.get(branch, length) for branch, length in enumerate(lengths))
        return replace(self.record, num_tokens=lengths, final_lengths=finals)


class MemoryState:
    """One store's data. Several MemoryStore handles on it are several processes on one server."""

    def __init__(
        self, now_ms: Callable[[], int] = wall_clock_ms, *, freeze_ms: int = 3000, retain_ms: int = 600_000
    ) -> None:
        self.now_ms = now_ms
        self.freeze_ms = freeze_ms
        self.retain_ms = retain_ms
        self.generation = max(1, now_ms() // 1000)
        self.frozen_until = 0
        self.arrivals = 0
        self.queue: set[SequenceId] = set()
        self.claims: dict[SequenceId, int] = {}  # popped, and until when
        self.checks: dict[SequenceId, int] = {}  # live, and when a sweep looks next
        self.leases: dict[Incarnation, int] = {}
        self.quarantine: dict[Incarnation, tuple[SequenceId, int]] = {}  # runs this suspect alone, until
        self.members: dict[str, dict[Incarnation, tuple[bytes, int]]] = {}
        self.secrets: dict[str, bytes] = {}
        self.subscribers: dict[asyncio.Queue[Notice], Incarnation] = {}
        self._entries: dict[SequenceId, Entry] = {}

    def restart(self) -> None:
        """What a crash and a restart of the server look like from outside, nothing being lost."""
        self.generation = max(self.generation + 1, self.now_ms() // 1000)
        self.frozen_until = self.now_ms() + self.freeze_ms

    @property
    def frozen(self) -> bool:
        return self.frozen_until > self.now_ms()

    def lease_alive(self, member: Incarnation) -> bool:
        return self.leases.get(member, 0) > self.now_ms()

    # Entries

    def add(self, entry: Entry) -> None:
        self._entries[entry.record.seq_id] = entry
        self.checks[entry.record.seq_id] = self.now_ms() + CHECK_MS
        self.wait(entry)

    def get(self, seq_id: SequenceId) -> Entry | None:
        entry = self._entries.get(seq_id)
        if entry is not None and entry.expires_ms <= self.now_ms():
            del self._entries[seq_id]
            return None
        return entry

    def purge(self) -> None:
        """Drops what has expired and was not asked for since."""
        for seq_id in list(self._entries):
            self.get(seq_id)

    def note(self, entry: Entry, what: str, detail: str) -> None:
        record = entry.record
        line = (self.now_ms() - record.accepted_ms, what, detail)
        record.timeline = (*record.timeline, line)[-MAX_TIMELINE:]

    # Notices

    def notify(self, entry: Entry, what: str) -> None:
        """To the attached router."""
        record = entry.record
        notice = Notice(record.seq_id, what, record.epoch, record.owner)
        for queue, router in self.subscribers.items():
            if record.router and router == record.router:
                queue.put_nowait(notice)

    def wake(self, entry: Entry) -> None:
        """To all routers: something waits."""
        for queue in self.subscribers:
            queue.put_nowait(Notice(entry.record.seq_id, "queued", entry.record.epoch, Incarnation("")))

    # The queue

    def wait(self, entry: Entry) -> None:
        self.claims.pop(entry.record.seq_id, None)
        self.queue.add(entry.record.seq_id)
        self.wake(entry)

    def next_arrival(self, priority: int) -> int:
        self.arrivals += 1
        return priority * 2**40 + self.arrivals

    def first_waiting(self) -> SequenceId | None:
        def order(seq_id: SequenceId) -> tuple[int, SequenceId]:
            entry = self.get(seq_id)
            return (entry.place if entry else 0, seq_id)

        return min(self.queue, key=order, default=None)

    def depth(self) -> QueueDepth:
        waiting = [*self.queue, *self.claims]
        entries = [entry for entry in map(self.get, waiting) if entry is not None]
        return QueueDepth(len(waiting), sum(entry.cost for entry in entries))

    # Ends

    def finish(self, entry: Entry, finish: Finish) -> None:
        """Ends the branches that are meant, where they still run. The sequence ends with its last branch."""
        record = entry.record
        finishes, scores = list(record.finishes), list(record.scores)
        for branch in finish.branches(record.num_branches):
            if finishes[branch] == FinishReason.NONE:
                finishes[branch], scores[branch] = finish.reason, finish.score
                if finish.length is not None:
                    entry.cuts[branch] = finish.length
        record.finishes, record.scores = tuple(finishes), tuple(scores)
        record.failure = record.failure or finish.failure
        if FinishReason.NONE not in finishes:
            self._close(entry)

    def cut(self, entry: Entry, branch: int, length: int, score: float | None) -> None:
        """Moves the end of a branch back to `length`, where the worker has gone past a stop string."""
        record = entry.record
        finishes, scores = list(record.finishes), list(record.scores)
        past = length < entry.cuts.get(branch, len(entry.journals[branch]))
        if past and finishes[branch] in (FinishReason.STOP, FinishReason.LENGTH):
            finishes[branch], scores[branch], entry.cuts[branch] = FinishReason.STOP, score, length
            record.finishes, record.scores = tuple(finishes), tuple(scores)

    def _close(self, entry: Entry) -> None:
        record = entry.record
        record.state = State.DONE
        if FinishReason.ERROR in record.finishes:
            record.state = State.FAILED
        elif FinishReason.CANCELLED in record.finishes:
            record.state = State.CANCELLED
        record.mig_id = record.mig_to = ""
        self.note(entry, "ended", record.state)
        self.queue.discard(record.seq_id)
        self.claims.pop(record.seq_id, None)
        self.checks.pop(record.seq_id, None)
        self.release_quarantine(entry)
        entry.expires_ms = self.now_ms() + self.retain_ms
        self.notify(entry, "ended")

    def cancel(self, entry: Entry) -> None:
        """A waiting sequence ends; a running one is told at its next append."""
        record = entry.record
        if record.state is State.QUEUED:
            self.finish(entry, Finish(record.seq_id, FinishReason.CANCELLED))
        elif record.state is State.RUNNING and not record.cancel:
            record.cancel = True
            self.note(entry, "cancelled", record.owner)
            self.notify(entry, "cancelled")

    def release_quarantine(self, entry: Entry) -> None:
        owner = entry.record.owner
        if owner in self.quarantine and self.quarantine[owner][0] == entry.record.seq_id:
            del self.quarantine[owner]

    def past_deadline(self, record: Record) -> bool:
        return 0 < record.deadline_ms <= self.now_ms()
