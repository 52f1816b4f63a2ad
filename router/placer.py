"""Gives sequences to workers: new ones from the queue, and those whose owner was lost. The store decides who owns.

The same few steps either way: read the record, choose a worker, take in its name, schedule there. Whatever goes wrong
between take and schedule only costs another epoch.
"""

import asyncio
import logging
from collections import OrderedDict

from octavo import hashing, wire
from octavo.errors import Failure, TooLarge
from octavo.ids import Incarnation, SequenceId, new_operation_id
from octavo.record import Snapshot, Taken, TakeStatus, Why
from octavo.sampling import FinishReason
from octavo.store.base import Store
from router.hub import Hub, Placed
from router.models import Model, Models
from router.placement import Decision, place
from router.workers import Admission, LinkBroken, Outcome, WorkerLink, WorkerPool

log = logging.getLogger(__name__)

DECISIONS_REMEMBERED = 1024
ALONE_AFTER_CRASHES = 2


class Placer:
    """Starts sequences on workers. One attempt per sequence at a time on this router; others may try too."""

    def __init__(self, store: Store, pool: WorkerPool, hub: Hub, models: Models) -> None:
        self.decisions: OrderedDict[SequenceId, Decision] = OrderedDict()
        self._store = store
        self._pool = pool
        self._hub = hub
        self._models = models
        self._busy: set[SequenceId] = set()

    async def start(self, seq_id: SequenceId, expected_epoch: int, why: Why) -> None:
        """Puts a sequence on a worker, if it still is at that epoch and somebody has room."""
        if seq_id in self._busy:
            return
        self._busy.add(seq_id)
        try:
            snapshot = await self._store.read(seq_id, prompt=True, from_indexes=())
            if snapshot is not None and not snapshot.record.state.ended and snapshot.record.epoch == expected_epoch:
                await self._start(snapshot, why)
        finally:
            self._busy.discard(seq_id)

    def explain(self, model: Model, prompt: list[int], salt: str, excluded: set[Incarnation]) -> Decision:
        """What placement would decide now."""
        root = hashing.root_key(model.fingerprint, model.layout, salt=salt)
        hits = self._pool.index.hits(hashing.block_hashes(root, prompt, model.block_size))
        tokens = {id: (device * model.block_size, host * model.block_size) for id, (device, host) in hits.items()}
        views = [view for view in self._pool.views(model.fingerprint) if view.incarnation not in excluded]
        return place(len(prompt), tokens, views)

    async def _start(self, snapshot: Snapshot, why: Why) -> None:
        record, epoch = snapshot.record, snapshot.record.epoch
        model = self._models.by_fingerprint(record.model)
        excluded = {record.owner} if record.owner else set()
        while True:
            link = self._choose(snapshot, model, excluded) if model else None
            if link is None:
                if why in (Why.QUEUED, Why.REFUSED):
                    await self._store.requeue(record.seq_id, epoch)
                return  # an orphan stays one: the next sweep tries again
            taken = await self._take(record.seq_id, epoch, link, why)
            if taken.status not in (TakeStatus.OK, TakeStatus.SAME):
                self._hub.check([record.seq_id])
                return
            epoch = taken.epoch
            outcome, failure = await self._schedule(link, snapshot, taken)
            if outcome is Outcome.ADMITTED:
                self._hub.placed(record.seq_id, Placed(epoch, link.incarnation))
                return
            if outcome in (Outcome.NEVER, Outcome.REJECTED):
                await self._fail(record.seq_id, failure)
                return
            if outcome is Outcome.STALE_EPOCH:
                return
            excluded.add(link.incarnation)
            why = Why.REFUSED

    def _choose(self, snapshot: Snapshot, model: Model, excluded: set[Incarnation]) -> WorkerLink | None:
        record = snapshot.record
        prompt = list(snapshot.prompt) + list(snapshot.outputs[0] if snapshot.outputs else ())
        decision = self.explain(model, prompt, record.salt, excluded)
        self.decisions[record.seq_id] = decision
        if len(self.decisions) > DECISIONS_REMEMBERED:
            self.decisions.popitem(last=False)
        link = self._pool.find(decision.worker.incarnation) if decision.worker else None
        if link is not None:
            on_device, _ = decision.hits.get(link.incarnation, (0, 0))
            link.picked(record.seq_id, len(prompt) - on_device)
        return link

    async def _take(self, seq_id: SequenceId, epoch: int, link: WorkerLink, why: Why) -> Taken:
        take_id = new_operation_id()
        while True:
            taken = await self._store.take(seq_id, epoch, link.incarnation, take_id, why)
            if taken.status != TakeStatus.FROZEN:
                return taken
            await asyncio.sleep(taken.retry_ms / 1000)

    async def _schedule(self, link: WorkerLink, snapshot: Snapshot, taken: Taken) -> tuple[Outcome, Failure | None]:
        try:
            return await link.schedule(admission_of(snapshot, taken))
        except LinkBroken as error:
            log.warning("%s", error)
            return Outcome.LATER, None

    async def _fail(self, seq_id: SequenceId, failure: Failure | None) -> None:
        failure = failure or TooLarge("no worker can hold this request").failure()
        await self._store.finish(seq_id, -1, FinishReason.ERROR, None, failure.to_json())
        self._hub.check([seq_id])


def admission_of(snapshot: Snapshot, taken: Taken) -> Admission:
    record = snapshot.record
    return Admission(
        seq_id=record.seq_id,
        epoch=taken.epoch,
        prompt=snapshot.prompt,
        outputs=snapshot.outputs,
        finished_branches=[branch for branch, finish in enumerate(record.finishes) if finish],
        sampling=wire.sampling_from_bytes(record.sampling),
        salt=record.salt,
        priority=record.priority,
        deadline_in_ms=max(1, record.deadline_ms - snapshot.now_ms) if record.deadline_ms else 0,
        alone=taken.crashes >= ALONE_AFTER_CRASHES,
    )
