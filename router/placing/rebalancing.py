"""Which running sequences should move to another worker now, because theirs has more to do than the mean of its fleet.

A pure function of snapshots. A worker that drains moves its sequences itself: nothing is proposed for it.

Moves that answer each other are what it must never cause. A load may differ from the mean within a band; no move
leaves its target with more load than its source had; and each move keeps its sequence and its two workers at rest for
a while. docs/decisions/router.md has the reasons for the figures.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest
from itertools import chain, islice
from operator import itemgetter

from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import WorkerRole
from router.fleet.worker_view import BRANCH_TOKENS, SequenceView, WorkerSnapshot, WorkerView
from router.placing.placement import slow_speed, slowness
from router.placing.target_choice import choose_cheapest, has_any_room, has_room

REST_S = 10.0  # after a migration: for its sequence, and for its two workers with each other
RETURN_S = 60.0  # after a migration: until its sequence may come back to a worker that it left
MOVES_IN_RETURN_S = 2  # migrations of one sequence within RETURN_S
MIN_EXPECTED_TOKENS = 32  # a sequence that ends sooner stays
AT_ONCE = 4  # migrations under way
HIGH_LOAD = 1.15  # of the mean: workers with less keep their sequences
HIGH_LOAD_TOKENS = 2 * BRANCH_TOKENS  # and with less than this above the mean
CONTEXT_COST = 1 / 64  # of a token that a sequence holds, in tokens of load: 2048 cost as much as one branch
HORIZON_TOKENS = 256  # longer expectations of a sequence do not count: it may end at any token
MIGRATION_TOKENS = 4096  # what a migration costs beside its blocks, in tokens that are copied
TRIES = 3  # sequences of one worker for which a target is sought


@dataclass(frozen=True, slots=True)
class ProposedMigration:
    """A proposal that a sequence migrate, and the reason."""

    seq_id: SequenceId
    source: Incarnation
    target: Incarnation
    detail: str  # why, in figures


@dataclass(slots=True, eq=False)
class PastMigration:
    """A migration that was begun, whatever became of it.

    It is under way until both workers have reported after its end: until then no report shows what it changes.
    """

    seq_id: SequenceId
    source: Incarnation
    target: Incarnation
    at: float
    under_way: bool = False
    ended_at: float | None = None


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


def plan_migrations(
    workers: Sequence[WorkerSnapshot], past: Sequence[PastMigration], now: float
) -> list[ProposedMigration]:
    """Proposes AT_ONCE migrations at most, less those under way. `past` are those, and all of the last RETURN_S."""
    history = MigrationHistory(past, now)
    fleets = [_FleetPlan(fleet, history) for fleet in _fleets_of(workers)]
    proposed = chain.from_iterable([fleet.even_load() for fleet in fleets])
    return list(islice(proposed, max(0, AT_ONCE - len(history.under_way))))


def find_overloaded(workers: Sequence[WorkerSnapshot]) -> list[Incarnation]:
    """The workers with so much load that a sequence of theirs may have to move. Their sequences need not be known."""
    fleets = [_FleetPlan(fleet, MigrationHistory((), 0.0)) for fleet in _fleets_of(workers)]
    return [id for fleet in fleets for id in fleet.overloaded()]


def load_of(view: WorkerView, slow: float = 0.0) -> float:
    """How busy a worker is for longer: its branches, the branches that are coming, and the tokens that all of them
    hold.

    Prompt tokens left to compute are no part of it: most of them are computed before a migration would end.
    """
    lasting = view.load_cost - view.queued_tokens - view.dispatched_tokens
    held_tokens = (view.num_blocks - view.num_free_blocks - view.num_cached_blocks) * view.block_size
    return slowness(view, slow) * (lasting + CONTEXT_COST * held_tokens)


def _fleets_of(workers: Sequence[WorkerSnapshot]) -> list[list[WorkerSnapshot]]:
    """The living workers by model, layout and numerics, in the order of their ids."""
    fleets: dict[tuple[str, str, str], list[WorkerSnapshot]] = {}
    for worker in sorted(workers, key=lambda worker: worker.view.incarnation):
        if worker.alive:
            fleets.setdefault((worker.model, worker.layout, worker.view.numerics), []).append(worker)
    return list(fleets.values())


class _FleetPlan:
    """The plan for workers of one model, layout and class. Their views change with every migration that is proposed."""

    def __init__(self, workers: Sequence[WorkerSnapshot], history: MigrationHistory) -> None:
        self._workers = {worker.view.incarnation: worker for worker in workers}
        self._history = history
        self._slow = slow_speed([worker.view for worker in workers])
        self._loads = {id: self._load_of(worker.view) for id, worker in self._workers.items()}
        for migration in history.under_way:
            if source := self._workers.get(migration.source):
                for sequence in source.sequences:
                    if sequence.seq_id == migration.seq_id:
                        self._move(sequence, migration.source, migration.target)
        self._serving = [id for id, worker in self._workers.items() if not worker.draining]
        self._mean = sum(self._loads[id] for id in self._serving) / len(self._serving) if self._serving else 0.0

    def even_load(self) -> Iterator[ProposedMigration]:
        """At most one migration per worker above the band, of the busiest worker first."""
        for source in self._busiest():
            if migration := self._relieve(source):
                yield migration

    def overloaded(self) -> list[Incarnation]:
        """The workers above the band, the busiest first."""
        return [id for id in self._busiest() if self._is_overloaded(id)]

    def _is_overloaded(self, worker: Incarnation) -> bool:
        load = self._loads[worker]
        return load > HIGH_LOAD * self._mean and load - self._mean >= HIGH_LOAD_TOKENS

    def _busiest(self) -> list[Incarnation]:
        return sorted(self._serving, key=lambda id: (-self._loads[id], id))

    def _relieve(self, source: Incarnation) -> ProposedMigration | None:
        """Moves one sequence of a worker above the band. Its target stays below the band, and below the source."""
        if not self._is_overloaded(source):
            return None
        load = self._loads[source]
        highest = HIGH_LOAD * self._mean
        targets = self._find_targets(source, min(load, highest))
        if not targets:
            return None
        view, gap = self._workers[source].view, load - min(self._loads[target] for target in targets)
        gains: list[tuple[float, SequenceId, SequenceView]] = []
        for sequence in self._workers[source].sequences:
            relief = BRANCH_TOKENS * sequence.num_branches + CONTEXT_COST * view.block_size * sequence.num_own_blocks
            if 2 * relief <= gap and self._history.may_move(sequence):
                used_up = MIGRATION_TOKENS + sequence.num_blocks * view.block_size
                gain = relief * min(sequence.expected_tokens, HORIZON_TOKENS) / used_up
                gains.append((gain, sequence.seq_id, sequence))
        for _, _, sequence in nlargest(TRIES, gains, key=itemgetter(0, 1)):
            after = self._load_of(_without(view, sequence))
            if target := self._choose_target(sequence, source, targets, min(after, highest)):
                detail = f"load {load:.0f}, mean {self._mean:.0f}, target {self._loads[target.incarnation]:.0f}"
                migration = ProposedMigration(sequence.seq_id, source, target.incarnation, detail)
                self._history.add(migration)
                self._move(sequence, source, target.incarnation)
                return migration
        return None

    def _find_targets(self, source: Incarnation, highest: float) -> list[Incarnation]:
        """The workers with less than that load to which anything may go from `source` now, and that have any room."""
        targets = [id for id in self._serving if self._loads[id] < highest and id != source]
        targets = [id for id in targets if self._workers[id].view.role is not WorkerRole.PREFILL]
        return [id for id in targets if has_any_room(self._workers[id].view) and not self._history.rests(source, id)]

    def _choose_target(
        self, sequence: SequenceView, source: Incarnation, targets: Sequence[Incarnation], highest: float
    ) -> WorkerView | None:
        """The cheapest of the targets that has at most that load with the sequence, and has not had it lately."""
        views = [
            view
            for view in (self._workers[id].view for id in targets)
            if view.available
            and has_room(view, sequence)
            and not self._history.returns(sequence, view.incarnation)
            and self._load_of(_with(view, sequence)) <= highest
        ]
        return choose_cheapest(sequence, self._workers[source].view.block_size, views, {}).worker

    def _move(self, sequence: SequenceView, source: Incarnation, target: Incarnation) -> None:
        """Changes the views to what they will be when the sequence has moved."""
        for id, change in ((source, _without), (target, _with)):
            if worker := self._workers.get(id):
                view = change(worker.view, sequence)
                self._workers[id], self._loads[id] = replace(worker, view=view), self._load_of(view)

    def _load_of(self, view: WorkerView) -> float:
        return load_of(view, self._slow)


def _without(view: WorkerView, sequence: SequenceView) -> WorkerView:
    return replace(
        view,
        num_running=max(0, view.num_running - sequence.num_branches),
        num_free_blocks=view.num_free_blocks + sequence.num_own_blocks,
    )


def _with(view: WorkerView, sequence: SequenceView) -> WorkerView:
    """The view with one more sequence, which takes free blocks first, then those that are only cached."""
    num_free = view.num_free_blocks - sequence.num_blocks
    return replace(
        view,
        num_running=view.num_running + sequence.num_branches,
        num_free_blocks=max(0, num_free),
        num_cached_blocks=max(0, view.num_cached_blocks + min(0, num_free)),
    )
