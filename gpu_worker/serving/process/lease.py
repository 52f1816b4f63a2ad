"""A worker's id and lease in the store.

The lease means that the step loop makes progress, and only that progress renews it. Of two workers with one id, the
store names one. The other one ends once it has seen that one renew its lease, and not before: after a failover to a
replica that had lagged, the store may name a worker that has long ended.
"""

import asyncio
import logging
import math
import time
from contextlib import suppress
from dataclasses import replace

from octavo.process.retry import until_answered
from octavo.request.errors import StoreUnavailable
from octavo.store.base import Store
from octavo.store.calls import Member, NameHolder

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3
REGISTER_PAUSE_S = 0.1
LIFELINE_PAUSE_S = 1.0


class WorkerIdTaken(Exception):
    """Another worker has this worker's id. The message says which, and what to do."""

    def __init__(self, member: Member, holder: NameHolder) -> None:
        super().__init__(
            f"worker_id {member.name}: the worker at {holder.endpoint} ({holder.id}) has this id and renews its lease: "
            "end it, or give this one another --worker-id"
        )


async def register_worker(store: Store, member: Member, lease_ms: int) -> None:
    """Gets the worker its id, once the lease of another worker with this id has ended: after one lease at most.

    Raises WorkerIdTaken if that worker renews its lease, or if yet another one gets the id first.
    """
    seen: NameHolder | None = None
    while True:
        holder = await until_answered(lambda: store.register(member, lease_ms), what="start")
        if holder is None:
            return
        if seen is None:
            log.info("the worker at %s had the id %s: waiting until its lease ends", holder.endpoint, member.name)
        elif holder != seen:
            raise WorkerIdTaken(member, holder)
        seen = holder
        await asyncio.sleep(REGISTER_PAUSE_S)


class Lease:
    """Renews the lease when the step loop calls `beat`. No timer renews it."""

    def __init__(self, store: Store, member: Member, lease_ms: int) -> None:
        self._store = store
        self._member = member
        self._lease_ms = lease_ms
        self._loop = asyncio.get_running_loop()
        self._next_renewal = 0.0  # the engine's thread sets it to a later time, the event loop to now
        self._renewing: asyncio.Task[None] | None = None
        self._again = False  # something has changed during the renewal under way
        self._ended = False
        self._renewed_at = -math.inf
        self.lost = asyncio.Event()  # another worker has got the id
        self.loss: WorkerIdTaken | None = None  # says which one, once `lost` is set

    @property
    def runs(self) -> bool:
        """Whether the store has renewed the lease within its last duration, so that no other process sees its end."""
        return time.monotonic() - self._renewed_at < self._lease_ms / 1000

    async def hold_lifeline(self) -> None:
        """Lets the store see at once when this process is killed. For as long as the worker lives, whatever fails."""
        while True:
            try:
                await self._store.hold_lifeline(self._member.id, self._renew_next)
            except Exception as error:  # without it a take waits for a missed renewal, as ever
                log.warning("no lifeline to the store for %g s: %s: %s", LIFELINE_PAUSE_S, type(error).__name__, error)
            await asyncio.sleep(LIFELINE_PAUSE_S)

    def beat(self) -> None:
        """Renews the lease if a third of its time has passed. The engine calls this after each step and idle round."""
        now = time.monotonic()
        if now >= self._next_renewal:
            self._next_renewal = now + self._lease_ms / 1000 / RENEWALS_PER_LEASE
            self._loop.call_soon_threadsafe(self._start_renewal)

    def _start_renewal(self) -> None:
        if not self._ended and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._renew())

    def _renew_next(self) -> None:
        """Renews at the next progress, and after the renewal under way, so that the store hears the lifeline soon."""
        self._next_renewal = 0.0
        self._again = self._renewing is not None and not self._renewing.done()

    def _renew_soon(self) -> None:
        """Tells the store of something new: now, or after the renewal under way."""
        self._again = self._renewing is not None and not self._renewing.done()
        self._start_renewal()

    async def _renew(self) -> None:
        await self._renew_once()
        while self._again and not self._ended:
            self._again = False
            await self._renew_once()

    async def _renew_once(self) -> None:
        asked_at = time.monotonic()
        try:
            while (await self._store.heartbeat(self._member, self._lease_ms)).holder is not None:
                await register_worker(self._store, self._member, self._lease_ms)
                asked_at = time.monotonic()
        except StoreUnavailable as error:
            log.warning("lease not renewed: %s", error)
        except WorkerIdTaken as taken:
            self._ended, self.loss = True, taken
            self.lost.set()
        else:
            self._renewed_at = asked_at

    def describe(self, info: bytes) -> None:
        """Changes what other processes read of this worker in the store, and tells the store soon."""
        self._member = replace(self._member, info=info)
        self._renew_soon()

    async def end(self, patience_s: float) -> None:
        """Ends the lease after a renewal under way, which would otherwise make the worker look alive again."""
        self._ended = True
        with suppress(StoreUnavailable, TimeoutError):  # the lease runs out by itself
            async with asyncio.timeout(patience_s):
                if self._renewing is not None:
                    await self._renewing
                await self._store.leave(self._member)
