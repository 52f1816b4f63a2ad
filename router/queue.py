"""Takes work out of the shared queue while some worker has room, and looks after what has lost its owner.

The queue itself, its order and its bounds are in the store, so that a router that dies loses no accepted request.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Coroutine

from octavo.errors import StoreUnavailable
from octavo.ids import Incarnation, SequenceId
from octavo.record import Notice, Why
from octavo.store.base import Store
from router.hub import Hub
from router.placement import room
from router.placer import Placer
from router.workers import WorkerPool

log = logging.getLogger(__name__)

POP_AT_ONCE = 16
CLAIM_MS = 10_000
IDLE_POLL_S = 0.5
SWEEP_S = 1.0
SWEEP_LIMIT = 256
RECOVERIES_AT_ONCE = 32


class Dispatcher:
    """The router's side of the queue: one loop that pops, one that listens, one that sweeps."""

    def __init__(
        self, store: Store, router_id: Incarnation, pool: WorkerPool, placer: Placer, hub: Hub, grace_ms: int
    ) -> None:
        self._store = store
        self._router_id = router_id
        self._pool = pool
        self._placer = placer
        self._hub = hub
        self._grace_ms = grace_ms
        self._wake = asyncio.Event()
        self._backlog = False  # when last looked at, more waited than there was room for
        self._tasks: set[asyncio.Task[None]] = set()
        self._recoveries = asyncio.Semaphore(RECOVERIES_AT_ONCE)

    def wake(self) -> None:
        """There may be something in the queue."""
        self._wake.set()

    def reported(self) -> None:
        """A worker has said how it is: there may be room again."""
        if self._backlog:
            self._wake.set()

    async def run(self) -> None:
        await asyncio.gather(self._pop_loop(), self._notice_loop(), self._sweep_loop())

    def recover(self, seq_id: SequenceId, epoch: int, why: Why) -> None:
        """Starts a sequence whose owner is gone somewhere else; many attempts at once do no harm."""
        self._spawn(self._recover(seq_id, epoch, why))

    async def recover_all(self, owner: Incarnation) -> None:
        """Everything a worker ran that this router has seen die."""
        try:
            records = await self._store.list_sequences(owner, 10_000)
        except StoreUnavailable:
            return  # the sweep finds them
        for record in sorted(records, key=lambda record: (record.priority, record.accepted_ms)):
            self.recover(record.seq_id, record.epoch, Why.CONNECTION)

    async def _recover(self, seq_id: SequenceId, epoch: int, why: Why) -> None:
        async with self._recoveries:
            await self._placer.start(seq_id, epoch, why)

    async def _pop_loop(self) -> None:
        while True:
            try:
                await asyncio.wait_for(self._wake.wait(), IDLE_POLL_S)
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._pop_while_room()
            except StoreUnavailable as error:
                log.warning("queue: %s", error)
                await asyncio.sleep(IDLE_POLL_S)

    async def _pop_while_room(self) -> None:
        while places := sum(room(link.view()) for link in self._pool.links.values()):
            count = min(places, POP_AT_ONCE)  # what is popped has lost its rank to whoever comes after it
            popped = await self._store.pop(self._router_id, count, CLAIM_MS)
            starts = [self._placer.start(item.seq_id, item.epoch, Why.QUEUED) for item in popped]
            for error in await asyncio.gather(*starts, return_exceptions=True):
                if isinstance(error, BaseException):
                    log.error("a start failed; its claim will end and it is queued again", exc_info=error)
            if len(popped) < count:
                self._backlog = False
                return
        self._backlog = True

    async def _notice_loop(self) -> None:
        while True:
            try:
                async for notice in self._notices():
                    self._take_notice(notice)
            except StoreUnavailable:
                await asyncio.sleep(IDLE_POLL_S)

    def _notices(self) -> AsyncIterator[Notice]:
        return self._store.notices(self._router_id)

    def _take_notice(self, notice: Notice) -> None:
        if notice.what == "queued":
            self.wake()
        if notice.seq_id in self._hub:
            self._hub.check([notice.seq_id])

    async def _sweep_loop(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S * random.uniform(0.5, 1.5))
            try:
                swept = await self._store.sweep(SWEEP_LIMIT, self._grace_ms)
            except StoreUnavailable:
                continue
            for seq_id, epoch in swept.orphans:
                self.recover(seq_id, epoch, Why.LEASE)
            if swept.requeued:
                self.wake()
            self._hub.check([*swept.cancelled, *swept.expired])

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            level = logging.WARNING if isinstance(error, StoreUnavailable) else logging.ERROR
            log.log(
                level,
                "recovery failed; the next sweep tries again: %s",
                error,
                exc_info=level == logging.ERROR and error,
            )
