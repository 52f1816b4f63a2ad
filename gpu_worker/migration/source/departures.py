"""The sequences that are on their way from here to other workers."""

from collections.abc import Collection

from gpu_worker.engine.worker_watch import WorkerWatch
from gpu_worker.migration.source.outgoing_migration import OutgoingMigration
from octavo.request.ids import SequenceId


class Departures:
    """The migrations that are under way, by sequence."""

    def __init__(self, watch: WorkerWatch) -> None:
        self._watch = watch
        self.migrations: dict[SequenceId, OutgoingMigration] = {}

    @property
    def moving(self) -> Collection[SequenceId]:
        """The sequences that are on their way. Those that wait for their prompt to be started are not."""
        return [seq_id for seq_id, migration in self.migrations.items() if not migration.awaits_start]

    def count_awaiting_start(self) -> int:
        """How many wait for their prompt to be started."""
        return sum(migration.awaits_start for migration in self.migrations.values())

    def others_decode(self) -> bool:
        """Whether sequences run here besides those that are leaving. All of them leave a worker that drains."""
        if self._watch.draining:
            return False
        leaving = sum(each.num_branches for each in self.migrations.values() if not each.awaits_start)
        return self._watch.load.num_running > leaving
