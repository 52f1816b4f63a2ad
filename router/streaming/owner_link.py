"""Which worker runs the sequence of one session, and whether that worker's Step stream brings the sequence's items."""

import time
from collections.abc import Sequence

from octavo.request.ids import Incarnation
from octavo.request.record import Record, SequenceState
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_pool import WorkerPool

UNKNOWN_S = 0.02  # pause before an owner that does not know its sequence is asked again; doubles
MAX_UNKNOWN_S = 0.5
UNKNOWN_FOR_S = 4.0  # longer than a Schedule may take: an owner that does not know its sequence by then never got it


class OwnerLink:
    """One session's view of the owner. The record decides; a notice or an assignment may name a newer one first."""

    def __init__(self, record: Record, pool: WorkerPool) -> None:
        self.record = record
        self._pool = pool
        # The owner and the epoch at which that owner was asked for the items; None if no owner was asked.
        self._stream: tuple[Incarnation, int] | None = None
        self._unknown_epoch = 0
        self._unknown_since = 0.0
        self._pause_s = UNKNOWN_S

    @property
    def worker_link(self) -> WorkerLink | None:
        """This router's link to the owner, if there is an owner and this router has found it."""
        return self._pool.find_link(self.record.owner)

    @property
    def is_lost(self) -> bool:
        """Whether this router has seen the owner die."""
        return self._pool.has_lost(self.record.owner)

    @property
    def is_streaming(self) -> bool:
        """Whether the owner sends the sequence's items to this router."""
        worker = self.worker_link
        is_connected = worker is not None and worker.step_stream.connected
        return is_connected and self._stream == (self.record.owner, self.record.epoch)

    def set_owner(self, owner: Incarnation, epoch: int, *, is_streaming: bool) -> None:
        """A worker runs the sequence from that epoch on. `is_streaming`: it sends the items to this router."""
        self.record.owner, self.record.epoch, self.record.state = owner, epoch, SequenceState.RUNNING
        self._stream = (owner, epoch) if is_streaming else None

    def follow_items(self, next_indexes: Sequence[int]) -> None:
        """Asks the owner for the items from those indexes on, if this router is connected to the owner."""
        record, worker = self.record, self.worker_link
        if record.state is SequenceState.RUNNING and worker is not None and worker.step_stream.connected:
            worker.step_stream.follow(record.seq_id, next_indexes)
            self._stream = (record.owner, record.epoch)
        else:
            self._stream = None

    def unknown_delay(self) -> float | None:
        """The owner says that it does not know the sequence. Returns the seconds to wait before it is asked again.

        Either the Schedule is on its way, or the sequence has ended there, or the router that was to send the Schedule
        has died. Returns None when the owner has had so much time that only the last can be true.
        """
        now, epoch = time.monotonic(), self.record.epoch
        self._stream = None
        if self._unknown_epoch != epoch:
            self._unknown_epoch, self._unknown_since, self._pause_s = epoch, now, UNKNOWN_S
        elif now - self._unknown_since > UNKNOWN_FOR_S:
            self._unknown_epoch = 0
            return None
        self._pause_s = min(2 * self._pause_s, MAX_UNKNOWN_S)
        return self._pause_s / 2
