"""What became of the migrations from this worker, for monitoring."""

from collections import Counter
from collections.abc import Iterator

from gpu_worker.migration.source.migration_progress import MigrationOutcome, MigrationProgress
from octavo.metrics.table import STALL_BOUNDS
from octavo.metrics.value import Histogram, MetricValue


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
