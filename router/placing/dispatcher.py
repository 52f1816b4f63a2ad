"""Pops sequences from the shared queue while a worker has room, and recovers sequences that lost their owner.

The queue itself, its order and its limits are in the store, so that a router that dies loses no accepted request.
"""

import asyncio
import logging
import random
from collections import Counter
from dataclasses import dataclass, field

from octavo.process.retry import until_answered
from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation, SequenceId
from octavo.request.record import Record, SequenceState, Snapshot
from octavo.request.sampling import FinishReason
from octavo.store.base import Store
from octavo.store.calls import Finish, TakeReason
from router.background_tasks import BackgroundTasks, repeat_forever
from router.fleet.worker_pool import WorkerPool
from router.fleet.worker_view import WorkerView
from router.placing.assigner import STORE_PATIENCE_S, Assigner
from router.placing.placement import places_to_keep, room_for_prompts
from router.session_registry import SessionRegistry

log = logging.getLogger(__name__)

POP_AT_ONCE = 16
CLAIM_MS = 2000  # longer than most assignments take; a take after the claim's end does no harm
IDLE_POLL_S = 0.5
SWEEP_S = 1.0
SWEEP_INTERVAL_MS = 500  # of all routers together
SWEEP_LIMIT = 512
RECOVERIES_AT_ONCE = 32
CANCEL_PATIENCE_S = 2.0  # a worker that has not stopped a cancelled sequence by then never stops it


@dataclass(eq=False)
class Dispatcher:
    """Three loops: one pops the queue, one reads the store's notices, one sweeps."""

    store: Store
    router_id: Incarnation
    pool: WorkerPool
    assigner: Assigner
    sessions: SessionRegistry
    background: BackgroundTasks
    grace_ms: int
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _backlog: bool = False  # whether the last pop stopped for lack of room, so that more sequences may wait
    _has_newcomer: bool = False  # whether a sequence may have come into the queue since the last pop
    # By model: the places left when the last pop may have held sequences back.
    _held_back: dict[str, int] = field(default_factory=dict)
    _num_assigning: Counter[str] = field(default_factory=Counter)  # by model
    _num_popping: int = 0
    _num_recovering: int = 0
    _stopping: bool = False
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)  # no assignment is in progress, and none begins
    _recoveries: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(RECOVERIES_AT_ONCE))
    _sweep_was_full: bool = False  # whether the last sweep has left work to the next one

    async def keep_dispatching(self) -> None:
        """Runs the three loops for as long as the router lives."""
        await asyncio.gather(
            repeat_forever("queue", self._pop_queue),
            repeat_forever("notices", self._read_notices),
            repeat_forever("sweep", self._sweep),
        )

    def note_queued(self) -> None:
        """A sequence may be in the queue."""
        self._has_newcomer = True
        self._wake.set()

    def note_room(self) -> None:
        """A worker may have room again: it has reported its load, or an assignment has ended."""
        if self._backlog:
            self._wake.set()

    def recover_sequence(self, seq_id: SequenceId, epoch: int, reason: TakeReason, seen: str = "") -> None:
        """Assigns a running sequence anew, whose owner is gone or never got it. Several routers may try.

        `seen` is what speaks against the owner, for the timeline.
        """
        if not self.assigner.is_assigning(seq_id) and not self._stopping:
            self._num_recovering += 1
            self.background.spawn(self._recover(seq_id, epoch, reason, seen))

    async def stop_assigning(self, patience_s: float) -> None:
        """Begins no more assignments, and waits for those in progress, for up to `patience_s`.

        An assignment that is cut off between its take and its Schedule leaves a sequence that nobody runs for a while.
        A pop whose answer is not waited for leaves one that nobody assigns until its claim has ended.
        """
        self._stopping = True
        self._note_ended()
        try:
            async with asyncio.timeout(patience_s):
                await self._stopped.wait()
        except TimeoutError:
            log.warning("%d assignments are cut off", self._num_assigning.total() + self._num_recovering)

    async def recover_sequences_of(self, owner: Incarnation) -> None:
        """Recovers every sequence of a worker that this router has seen die."""
        try:
            owned = await self.store.owned(owner)
        except StoreUnavailable:
            return  # a later sweep finds the sequences
        for found in owned:
            seen = "its streams broke, and a probe found no worker"
            self.recover_sequence(found.seq_id, found.epoch, TakeReason.CONNECTION, seen)

    async def cancel_sequence(self, seq_id: SequenceId) -> Record | None:
        """Cancels a sequence, which ends soon whatever its owner does. Returns its record, or None if there is none."""
        record = await self.store.cancel(seq_id)
        if record is not None and record.state is SequenceState.RUNNING:
            await self._stop_running(record)
        self.sessions.poll_records([seq_id])
        return record

    async def _stop_running(self, record: Record) -> None:
        link = self.pool.find_link(record.owner)
        if link is not None:
            await link.cancel_sequence(record.seq_id, record.epoch)
        self.background.spawn(self._end_cancelled(record.seq_id))

    async def _end_cancelled(self, seq_id: SequenceId) -> None:
        await asyncio.sleep(CANCEL_PATIENCE_S)
        await until_answered(
            lambda: self.store.finish(Finish(seq_id, FinishReason.CANCELLED)),
            patience_s=STORE_PATIENCE_S,
            what="end of a cancelled sequence",
        )

    async def _recover(self, seq_id: SequenceId, epoch: int, reason: TakeReason, seen: str) -> None:
        try:
            async with self._recoveries:
                await self.assigner.assign_sequence(seq_id, epoch, reason, seen)
        finally:
            self._num_recovering -= 1
            self._note_ended()

    def _note_ended(self) -> None:
        if self._stopping and not (self._num_popping or self._num_assigning.total() or self._num_recovering):
            self._stopped.set()

    # The queue

    async def _pop_queue(self) -> None:
        try:
            async with asyncio.timeout(IDLE_POLL_S):  # not wait_for, which loses a cancellation in Python 3.11
                await self._wake.wait()
        except TimeoutError:
            self._has_newcomer = True  # whose notice was lost
        self._wake.clear()
        self._backlog, newcomer, self._has_newcomer = False, self._has_newcomer, False
        for model in {link.facts.fingerprint for link in self.pool.links.values() if link.facts}:
            self._backlog |= await self._pop_model(model, newcomer)

    async def _pop_model(self, model: str, newcomer: bool) -> bool:
        """Pops the queue of one model while its workers have room. Returns whether more may wait than they have.

        What the last pop held back because the places were kept is popped when there are more places.
        """
        while not self._stopping and (places := self._room_left(model) - self._num_assigning[model]) > 0:
            if not newcomer and places <= self._held_back.get(model, 0):
                return True
            # Few at once: a more urgent newcomer cannot overtake sequences that are being assigned.
            count, most_kept = min(places, POP_AT_ONCE), places_to_keep(self._views(model))
            self._num_popping += 1
            try:
                popped = await self.store.pop(model, count, CLAIM_MS, places, most_kept)
                for item in popped:
                    self._num_assigning[model] += 1
                    self.background.spawn(self._assign_popped(model, item))
            finally:
                self._num_popping -= 1
                self._note_ended()
            places -= len(popped)
            may_hold_back = len(popped) < count and places <= most_kept
            self._held_back[model] = places if may_hold_back else 0
            if len(popped) < count:
                return may_hold_back
        return True

    def _room_left(self, model: str) -> int:
        """How many more sequences the workers of a model together should be given now."""
        return room_for_prompts(self._views(model))

    def _views(self, model: str) -> list[WorkerView]:
        links = self.pool.links.values()
        return [link.view() for link in links if link.facts and link.facts.fingerprint == model]

    async def _assign_popped(self, model: str, popped: Snapshot) -> None:
        """Runs as a task of its own, so that a worker that hangs does not keep sequences from the other workers."""
        try:
            await self.assigner.assign_popped(popped)
        finally:
            self._num_assigning[model] -= 1
            self._note_ended()
            self.note_room()

    # Notices and sweeps

    async def _read_notices(self) -> None:
        async for notice in self.store.notices(self.router_id):
            if notice.what == "queued":
                self.note_queued()
            # While an attempt is in progress, a notice is probably an echo of this router's own take. A foreign notice
            # that is lost here is made up for by the sessions, which read the record now and then.
            if not self.assigner.is_assigning(notice.seq_id):
                self.sessions.announce_notice(notice)

    async def _sweep(self) -> None:
        await asyncio.sleep(SWEEP_INTERVAL_MS / 1000 if self._sweep_was_full else SWEEP_S * random.uniform(0.5, 1.5))
        swept = await self.store.sweep(SWEEP_LIMIT, self.grace_ms, SWEEP_INTERVAL_MS)
        found = (len(swept.orphans), len(swept.requeued), len(swept.cancelled), len(swept.expired))
        self._sweep_was_full = max(found) >= SWEEP_LIMIT
        for orphan in swept.orphans:
            self.recover_sequence(orphan.seq_id, orphan.epoch, TakeReason.LEASE)
        if swept.requeued:
            self.note_queued()
        for seq_id in swept.cancelled:
            self.background.spawn(self.cancel_sequence(seq_id))  # its owner: what waits in a worker appends nothing
        self.sessions.poll_records([*swept.cancelled, *swept.expired])
