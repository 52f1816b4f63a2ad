"""Applies rebalancing: one router of all has running sequences move from busy workers to others.

The routers agree on that one without a word: it is the first by id of those with a lease. For a moment after a lease
has ended there may be two, or none. Nothing depends on it but evenness: each worker moves few sequences at once, and
one sequence has one migration at a time.
"""

import asyncio
import logging
import time
from dataclasses import dataclass, field, replace

from octavo.request.errors import ServingError
from octavo.request.ids import Incarnation
from octavo.request.record import Record, SequenceState
from octavo.store.base import Store
from octavo.wire.public import sampling_from_bytes
from router.background_tasks import BackgroundTasks
from router.fleet.worker_pool import WorkerPool
from router.fleet.worker_view import SequenceView, WorkerSnapshot, view_of_record
from router.placing.migrator import Migrator
from router.placing.rebalancing import (
    REST_S,
    RETURN_S,
    PastMigration,
    ProposedMigration,
    find_overloaded,
    plan_migrations,
)

log = logging.getLogger(__name__)

PERIOD_S = 2.0
MAX_LISTED = 1000  # sequences of one busy worker that are weighed


@dataclass(eq=False)
class Rebalancer:
    """Looks at the loads in rounds, and reads only the sequences of workers above the band, of which none drains."""

    store: Store
    router_id: Incarnation
    pool: WorkerPool
    migrator: Migrator
    background: BackgroundTasks
    _begun: list[PastMigration] = field(default_factory=list)
    _first_since: float | None = None  # since when this router is the one

    async def rebalance(self) -> None:
        """Waits, and makes one round. The router repeats this for as long as it lives."""
        await asyncio.sleep(PERIOD_S)
        if not await self._is_first():
            self._first_since = None
            return
        now = time.monotonic()
        self._first_since = self._first_since or now
        if now - self._first_since < REST_S:
            return  # the router that was the first before may have begun migrations, of which this one knows nothing
        self._begun = [begun for begun in self._begun if now - begun.at < RETURN_S or self._is_under_way(begun)]
        workers = self.pool.snapshots()
        if busy := find_overloaded(workers):
            sequences = {id: await self._views_of(id, now) for id in busy}
            workers = [replace(worker, sequences=sequences.get(worker.view.incarnation, ())) for worker in workers]
            self._begin(workers, now)

    async def _is_first(self) -> bool:
        members = await self.store.members("router")
        return bool(members) and min(member.id for member in members) == self.router_id

    async def _views_of(self, owner: Incarnation, now: float) -> list[SequenceView]:
        """The sequences that a worker runs, as far as their records tell."""
        link = self.pool.find_link(owner)
        records = await self.store.list_sequences(owner, MAX_LISTED)
        running = [record for record in records if record.state is SequenceState.RUNNING]
        snapshot = await self.store.read(running[0].seq_id) if running else None
        if link is None or link.facts is None or snapshot is None:
            return []
        block_size, now_ms = link.facts.block_size, snapshot.now_ms
        return [
            view_of_record(
                record,
                block_size,
                has_beams=bool(sampling_from_bytes(record.sampling).beam_width),
                last_moved_at=now - _ms_since_move(record, now_ms) / 1000,
            )
            for record in running
        ]

    def _begin(self, workers: list[WorkerSnapshot], now: float) -> None:
        for begun in self._begun:
            begun.under_way = self._is_under_way(begun)
        for proposed in plan_migrations(workers, self._begun, now):
            begun = PastMigration(proposed.seq_id, proposed.source, proposed.target, now)
            self._begun.append(begun)
            self.background.spawn(self._migrate(proposed, begun))

    async def _migrate(self, proposed: ProposedMigration, begun: PastMigration) -> None:
        source, target = self.pool.find_link(proposed.source), self.pool.find_link(proposed.target)
        names = f"{source and source.worker_id} to {target and target.worker_id}"
        what = f"{proposed.seq_id}: {names} ({proposed.detail})"
        try:
            if target is not None:
                report = await self.migrator.migrate(proposed.seq_id, target)
                log.info("moved sequence %s: %d blocks, stopped %.0f ms", what, report.num_blocks, report.stopped_ms)
        except ServingError as error:
            log.info("did not move sequence %s: %s", what, error.message)
        finally:
            begun.ended_at = time.monotonic()

    def _is_under_way(self, begun: PastMigration) -> bool:
        """Whether it goes on, or a report of its two workers may not show it yet."""
        ended_at = begun.ended_at
        if ended_at is None:
            return True
        links = [self.pool.find_link(id) for id in (begun.source, begun.target)]
        return any(link is not None and not link.lost and link.load_at <= ended_at for link in links)


def _ms_since_move(record: Record, now_ms: int) -> float:
    """The time since the sequence last came to a worker with its blocks, by the store's clock."""
    moves = [entry.after_ms for entry in record.timeline if entry.what == "migrated"]
    return now_ms - record.accepted_ms - max(moves) if moves else float("inf")
