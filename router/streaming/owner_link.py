"""Who runs a sequence, and whether what that worker journals comes here by itself."""

import time
from collections.abc import Sequence

from octavo.ids import Incarnation
from octavo.record import Record, State
from router.fleet.worker_pool import WorkerPool

UNKNOWN_S = 0.02  # until a worker that does not know its sequence is asked again; doubles
MAX_UNKNOWN_S = 0.5
UNKNOWN_FOR_S = 4.0  # after that long (longer than a Schedule may take) it never got it: somebody else shall run it


class OwnerLink:
    """One session's view of its owner. The record decides; notices and workers may be ahead of it."""

    def __init__(self, record: Record, pool: WorkerPool) -> None:
        self.record = record
        self._pool = pool
        self._stream: tuple[Incarnation, int] | None = None  # (owner, epoch) whose stream brings the items
        self._unknown_epoch = 0
        self._unknown_since = 0.0
        self._delay_s = UNKNOWN_S

    def runs_on(self, owner: Incarnation, epoch: int, *, streams: bool) -> None:
        """A worker has it, from that epoch on; `streams`: and sends its items here."""
        self.record.owner, self.record.epoch, self.record.state = owner, epoch, State.RUNNING
        self._stream = (owner, epoch) if streams else None

    def follow(self, next_indexes: Sequence[int]) -> None:
        """Asks the owner for the items from there on; without a connection to it there is nobody to ask."""
        record = self.record
        link = self._pool.find(record.owner)
        if record.state is State.RUNNING and link is not None and link.steps.connected:
            link.steps.follow(record.seq_id, next_indexes)
            self._stream = (record.owner, record.epoch)
        else:
            self._stream = None

    @property
    def streaming(self) -> bool:
        link = self._pool.find(self.record.owner)
        return link is not None and link.steps.connected and self._stream == (self.record.owner, self.record.epoch)

    def unknown(self) -> float | None:
        """The owner does not know it: how long to wait before asking again; None: long enough, it never got it.

        Its Schedule is on its way there; or it has ended there; or whoever was to send the Schedule has died.
        """
        now, epoch = time.monotonic(), self.record.epoch
        self._stream = None
        if self._unknown_epoch != epoch:
            self._unknown_epoch, self._unknown_since, self._delay_s = epoch, now, UNKNOWN_S
        elif now - self._unknown_since > UNKNOWN_FOR_S:
            self._unknown_epoch = 0
            return None
        self._delay_s = min(2 * self._delay_s, MAX_UNKNOWN_S)
        return self._delay_s / 2
