"""Which sequences of a worker that becomes empty move to others with their blocks, in which order, and which cannot."""

import math
import time
from dataclasses import dataclass

from gpu_worker.journal.sequence_log import SequenceLog
from gpu_worker.journal.step_publisher import StepPublisher
from gpu_worker.migration.source.migration_progress import MigrationOutcome, MigrationProgress
from gpu_worker.migration.source.migration_registry import MigrationRegistry
from octavo.request.errors import CannotMove, Code, ServingError, TooManyMoves
from octavo.request.ids import SequenceId

PAUSE_S = 0.5  # until a sequence is tried again for which no other worker had room, or whose blocks did not arrive
PREFILL_PAUSE_S = 0.1  # until a sequence is tried again whose prompt was being computed
MOST_FAILURES = 3  # of one sequence, of a kind that nobody waits for


@dataclass(slots=True)
class Setback:
    """What became of the last attempts to move a sequence."""

    epoch: int
    retry_at: float = 0.0
    num_failures: int = 0


class SequenceMover:
    """Begins migrations for a drain: those of the shortest sequences first, as many at once as the worker may."""

    def __init__(self, migrations: MigrationRegistry, publisher: StepPublisher) -> None:
        self._migrations = migrations
        self._publisher = publisher
        self._under_way: dict[SequenceId, MigrationProgress] = {}
        self._setbacks: dict[SequenceId, Setback] = {}

    def move_some(self) -> set[SequenceId]:
        """Begins what may begin now. Returns the sequences that move, or may still do: they are not to be released."""
        for progress in [each for each in self._under_way.values() if each.done.is_set()]:
            del self._under_way[progress.seq_id]
            self._note_outcome(progress)
        now, hoped = time.monotonic(), set(self._migrations.moving)
        for sequence_log in sorted(self._publisher.logs.values(), key=size_of):
            setback = self._setbacks.get(sequence_log.seq_id)
            retry_at = setback.retry_at if setback and setback.epoch == sequence_log.epoch else 0.0
            if math.isinf(retry_at):
                continue
            hoped.add(sequence_log.seq_id)
            begins = retry_at <= now and sequence_log.seq_id not in self._migrations.moving
            if begins and self._migrations.num_free > 0:
                self._begin(sequence_log)
        return hoped

    def forget_setbacks(self) -> None:
        """Lets every sequence be tried again: the drain has ended."""
        self._setbacks.clear()

    def _begin(self, sequence_log: SequenceLog) -> None:
        try:
            progress = self._migrations.begin(sequence_log.seq_id, sequence_log.epoch)
        except TooManyMoves:
            return  # a migration of an older epoch has not ended yet: the next call tries again
        self._under_way[sequence_log.seq_id] = progress

    def _note_outcome(self, progress: MigrationProgress) -> None:
        if progress.outcome is not MigrationOutcome.STAYED or progress.error is None:
            self._setbacks.pop(progress.seq_id, None)
            return
        setback = self._setbacks.get(progress.seq_id)
        if setback is None or setback.epoch != progress.epoch:
            setback = self._setbacks[progress.seq_id] = Setback(progress.epoch)
        setback.retry_at = time.monotonic() + self._pause_s(setback, progress.error)

    def _pause_s(self, setback: Setback, error: ServingError) -> float:
        """How long to wait before the sequence is tried again; infinite: it is to be released."""
        if isinstance(error, CannotMove):
            return PREFILL_PAUSE_S if error.cause == "prefill" else math.inf
        if error.code in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE):
            return PAUSE_S
        setback.num_failures += 1
        return PAUSE_S if setback.num_failures < MOST_FAILURES else math.inf


def size_of(sequence_log: SequenceLog) -> tuple[bool, int]:
    """The order of moves. What has no output comes first: most of it waits, cannot move, and is found out at once."""
    num_output = sum(branch.num_tokens for branch in sequence_log.branches)
    return num_output > 0, len(sequence_log.sequence.prompt) + num_output
