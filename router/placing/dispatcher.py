"""Takes work out of the shared queue while some worker has room, and looks after what has lost its owner.

The queue itself, its order and its bounds are in the store, so that a router that dies loses no accepted request.
"""

import asyncio
import logging
import random

from octavo.errors import StoreUnavailable
from octavo.ids import Incarnation, SequenceId
from octavo.record import Record, State
from octavo.sampling import FinishReason
from octavo.store.base import Store
from octavo.store.calls import Finish, Notice, PoppedSequence, TakeReason
from router.background_tasks import BackgroundTasks, patiently, repeat_forever
from router.fleet.worker_pool import WorkerPool
from router.placing.assigner import Assigner
from router.placing.placement import room
from router.session_registry import SessionRegistry

log = logging.getLogger(__name__)

POP_AT_ONCE = 16
CLAIM_MS = 2000  # to take what was popped; a late take does no harm, so this only has to be longer than most
IDLE_POLL_S = 0.5
SWEEP_S = 1.0
SWEEP_LIMIT = 256
RECOVERIES_AT_ONCE = 32
MAX_OWNED = 10_000
CANCEL_PATIENCE_S = 2.0  # a worker that has not stopped a cancelled sequence by then never will


class Dispatcher:
    """The router's side of the queue: one loop that pops, one that listens, one that sweeps."""

    def __init__(
        self,
        store: Store,
        router_id: Incarnation,
        pool: WorkerPool,
        assigner: Assigner,
        sessions: SessionRegistry,
        background: BackgroundTasks,
        grace_ms: int,
    ) -> None:
        self._store = store
        self._router_id = router_id
        self._pool = pool
        self._assigner = assigner
        self._sessions = sessions
        self._background = background
        self._grace_ms = grace_ms
        self._wake = asyncio.Event()
        self._backlog = False  # when last looked at, more waited than there was room for
        self._num_starting = 0
        self._recoveries = asyncio.Semaphore(RECOVERIES_AT_ONCE)

    async def run(self) -> None:
        """For as long as the router lives."""
        await asyncio.gather(
            repeat_forever("queue", self._pop),
            repeat_forever("notices", self._listen),
            repeat_forever("sweep", self._sweep),
        )

    def wake(self) -> None:
        """There may be something in the queue."""
        self._wake.set()

    def reported(self) -> None:
        """A worker has said how it is: there may be room again."""
        if self._backlog:
            self._wake.set()

    def recover(self, seq_id: SequenceId, epoch: int, why: TakeReason) -> None:
        """Starts a sequence whose owner is gone somewhere else; many attempts at once do no harm."""
        if not self._assigner.busy(seq_id):
            self._background.spawn(self._recover(seq_id, epoch, why))

    async def recover_all(self, owner: Incarnation) -> None:
        """Everything a worker ran that this router has seen die."""
        try:
            records = await self._store.list_sequences(owner, MAX_OWNED)
        except StoreUnavailable:
            return  # the sweep finds them
        for record in sorted(records, key=lambda record: (record.priority, record.accepted_ms)):
            self.recover(record.seq_id, record.epoch, TakeReason.CONNECTION)

    async def cancel(self, seq_id: SequenceId) -> Record | None:
        """The record afterwards; None: not found. A running sequence ends soon, even if nobody runs it."""
        record = await self._store.cancel(seq_id)
        if record is not None and record.state is State.RUNNING:
            await self._stop(record)
        self._sessions.check([seq_id])
        return record

    async def _stop(self, record: Record) -> None:
        link = self._pool.find(record.owner)
        if link is not None:
            await link.cancel(record.seq_id, record.epoch)
        self._background.spawn(self._end_cancelled(record.seq_id))

    async def _end_cancelled(self, seq_id: SequenceId) -> None:
        await asyncio.sleep(CANCEL_PATIENCE_S)
        await patiently(lambda: self._store.finish(Finish(seq_id, FinishReason.CANCELLED)))

    async def _recover(self, seq_id: SequenceId, epoch: int, why: TakeReason) -> None:
        async with self._recoveries:
            await self._assigner.start(seq_id, epoch, why)

    # The queue

    async def _pop(self) -> None:
        try:
            await asyncio.wait_for(self._wake.wait(), IDLE_POLL_S)
        except TimeoutError:
            pass
        self._wake.clear()
        while (places := self._room() - self._num_starting) > 0:
            count = min(places, POP_AT_ONCE)  # what is popped has lost its rank to whoever comes after it
            popped = await self._store.pop(self._router_id, count, CLAIM_MS)
            for item in popped:
                self._num_starting += 1
                self._background.spawn(self._start(item))
            if len(popped) < count:
                self._backlog = False
                return
        self._backlog = True

    def _room(self) -> int:
        """How many more sequences the workers should be given now."""
        return sum(room(link.view()) for link in self._pool.links.values())

    async def _start(self, item: PoppedSequence) -> None:
        """On its own: one worker that hangs must not keep requests from the others."""
        try:
            await self._assigner.start(item.seq_id, item.epoch, TakeReason.QUEUED)
        finally:
            self._num_starting -= 1
            self.reported()

    # What happens elsewhere

    async def _listen(self) -> None:
        async for notice in self._store.notices(self._router_id):
            self._take_notice(notice)

    def _take_notice(self, notice: Notice) -> None:
        if notice.what == "queued":
            self.wake()
        if not self._assigner.busy(notice.seq_id):  # else it is our own doing, and the assigner says how it ends
            self._sessions.noticed(notice)

    async def _sweep(self) -> None:
        await asyncio.sleep(SWEEP_S * random.uniform(0.5, 1.5))
        swept = await self._store.sweep(SWEEP_LIMIT, self._grace_ms)
        for orphan in swept.orphans:
            self.recover(orphan.seq_id, orphan.epoch, TakeReason.LEASE)
        if swept.requeued:
            self.wake()
        for seq_id in swept.cancelled:
            self._background.spawn(self._end_cancelled(seq_id))
        self._sessions.check([*swept.cancelled, *swept.expired])
