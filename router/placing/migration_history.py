"""Which migrations there were and are, and which further ones they forbid."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.request.ids import Incarnation, SequenceId
from router.fleet.worker_snapshot import SequenceView

REST_S = 10.0  # after a migration: for its sequence, and for its two workers with each other
RETURN_S = 60.0  # after a migration: until its sequence may come back to a worker that it left
MOVES_IN_RETURN_S = 2  # migrations of one sequence within RETURN_S
MIN_EXPECTED_TOKENS = 32  # a sequence that ends sooner stays


@dataclass(frozen=True, slots=True)
class ProposedMigration:
    """A proposal that a sequence migrate, and the reason."""

    seq_id: SequenceId
    source: Incarnation
    target: Incarnation
    detail: str  # why, in figures


@dataclass(frozen=True, slots=True)
class PastMigration:
    """A migration that was begun, whatever became of it.

    It is under way until both workers have reported after its end: until then no report shows what it changes.
    """

    seq_id: SequenceId
    source: Incarnation
    target: Incarnation
    at: float
    under_way: bool = False


class MigrationHistory:
    """What past migrations forbid."""

    def __init__(self, past: Sequence[PastMigration], now: float) -> None:
        self.under_way = [migration for migration in past if migration.under_way]
        self._now = now
        self._recent: dict[SequenceId, list[PastMigration]] = {}
        self._resting_pairs: set[frozenset[Incarnation]] = set()
        self._migrating = {migration.seq_id for migration in self.under_way}
        for migration in past:
            if migration.under_way or now - migration.at < RETURN_S:
                self._recent.setdefault(migration.seq_id, []).append(migration)
            if migration.under_way or now - migration.at < REST_S:
                self._resting_pairs.add(frozenset((migration.source, migration.target)))

    def add(self, migration: ProposedMigration) -> None:
        """Adds a migration: its sequence and its pair of workers are at rest from now on."""
        self._migrating.add(migration.seq_id)
        self._resting_pairs.add(frozenset((migration.source, migration.target)))

    def may_move(self, sequence: SequenceView) -> bool:
        """Whether the sequence may leave its worker."""
        if sequence.expected_tokens < MIN_EXPECTED_TOKENS or not sequence.can_move:
            return False
        if sequence.seq_id in self._migrating or self._now - sequence.last_moved_at < REST_S:
            return False
        recent = self._recent.get(sequence.seq_id)
        return not recent or (
            len(recent) < MOVES_IN_RETURN_S and all(self._now - migration.at >= REST_S for migration in recent)
        )

    def rests(self, source: Incarnation, target: Incarnation) -> bool:
        """Whether the two workers have to leave each other alone for now."""
        return frozenset((source, target)) in self._resting_pairs

    def returns(self, sequence: SequenceView, target: Incarnation) -> bool:
        """Whether the sequence has left that worker lately."""
        return any(migration.source == target for migration in self._recent.get(sequence.seq_id, ()))
