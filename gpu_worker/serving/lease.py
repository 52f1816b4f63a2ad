"""A worker's lease in the store. It means that the step loop makes progress, and only that progress renews it."""

import asyncio
import logging
import time

from octavo.errors import StoreUnavailable
from octavo.store.base import Store
from octavo.store.calls import Member

log = logging.getLogger(__name__)

RENEWALS_PER_LEASE = 3


class Lease:
    """Renews the lease when the step loop calls `beat`. No timer renews it."""

    def __init__(self, store: Store, member: Member, lease_ms: int) -> None:
        self._store = store
        self._member = member
        self._lease_ms = lease_ms
        self._loop = asyncio.get_running_loop()
        self._next_renewal = 0.0  # the engine's thread alone uses it
        self._renewing: asyncio.Task[None] | None = None
        self._ended = False
        self.begun = False  # the store knows this worker

    def beat(self) -> None:
        """Renews the lease if a third of its time has passed. The engine calls this after each step and idle round."""
        now = time.monotonic()
        if now >= self._next_renewal:
            self._next_renewal = now + self._lease_ms / 1000 / RENEWALS_PER_LEASE
            self._loop.call_soon_threadsafe(self._start_renewal)

    def _start_renewal(self) -> None:
        if not self._ended and (self._renewing is None or self._renewing.done()):
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        try:
            await self._store.heartbeat(self._member, self._lease_ms)
        except StoreUnavailable as error:
            log.warning("lease not renewed: %s", error)
        else:
            self.begun = True

    async def end(self) -> None:
        """Ends the lease after a renewal under way, which would otherwise make the worker look alive again."""
        self._ended = True
        if self._renewing is not None:
            await self._renewing
        try:
            await self._store.leave(self._member)
        except StoreUnavailable:
            pass  # the lease runs out by itself
