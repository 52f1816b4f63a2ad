"""How far a migration has come, and how it ended, for its waiting callers."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum

from octavo.metrics.table import STALL_BOUNDS
from octavo.metrics.value import Histogram, MetricValue
from octavo.request.errors import NotFound, ServingError, StaleEpoch
from octavo.request.ids import Incarnation, SequenceId


class SequenceGone(Exception):
    """The sequence has ended at the source, or has another owner: its migration is over."""


@contextmanager
def gone_without_engine() -> Iterator[None]:
    """Raises SequenceGone where the engine says that it does not have the sequence, or not at this epoch.

    The engine knows that before the log does: the log is gone when the last tokens are journalled.
    """
    try:
        yield
    except (NotFound, StaleEpoch) as error:
        raise SequenceGone from error


class MigrationOutcome(Enum):
    """What became of a migration."""

    MOVED = "moved"  # the target runs the sequence
    STAYED = "stayed"  # the sequence runs here as before
    ENDED = "ended"  # the sequence has ended, or another worker has taken it


@dataclass(slots=True)
class MigrationProgress:
    """How far a migration has come. The numbers are about the target that is tried now."""

    seq_id: SequenceId
    epoch: int  # of the sequence: one more once it has moved
    target: Incarnation = Incarnation("")
    rounds: int = 0  # deliveries of blocks that have begun
    num_blocks: int = 0  # of the sequence: full ones, and last ones that travel
    num_sent_blocks: int = 0
    num_sent_bytes: int = 0
    total_s: float = 0.0  # from the beginning to the outcome
    stopped_s: float = 0.0  # from the last step here to the answer of the target
    outcome: MigrationOutcome | None = None  # None: it goes on
    error: ServingError | None = None  # why it stayed
    done: asyncio.Event = field(default_factory=asyncio.Event)  # there is an outcome

    def begin_target(self, target: Incarnation) -> None:
        """Counts anew, for another target."""
        self.target = target
        self.rounds = self.num_blocks = self.num_sent_blocks = self.num_sent_bytes = 0


class MigrationTally:
    """Counts migrations that are over. Of a worker from which none leaves it stays as it is."""

    def __init__(self) -> None:
        self._outcomes = Counter(dict.fromkeys(MigrationOutcome, 0))
        self._num_bytes = 0
        self._stalls = Histogram(STALL_BOUNDS)

    @property
    def num_moved(self) -> int:
        return self._outcomes[MigrationOutcome.MOVED]

    def note_over(self, progress: MigrationProgress) -> None:
        """Counts a migration, unless it was cut off with the worker."""
        if progress.outcome is None:
            return
        self._outcomes[progress.outcome] += 1
        self._num_bytes += progress.num_sent_bytes
        if progress.outcome is MigrationOutcome.MOVED:
            self._stalls.observe(progress.stopped_s)

    def values(self) -> Iterator[MetricValue]:
        for outcome, count in self._outcomes.items():
            yield MetricValue("octavo_migrations_total", count, (outcome.value,))
        yield MetricValue("octavo_migration_bytes_total", self._num_bytes)
        yield MetricValue("octavo_migration_stall_seconds", self._stalls)
