"""A worker's lease in the store: it says that the engine makes progress, and nothing else renews it."""

import asyncio
import logging
import time

from octavo.errors import StoreUnavailable
from octavo.store.base import Store
from octavo.store.calls import Member

log = logging.getLogger(__name__)


class Lease:
    """The step loop calls `beat`; no timer does. Three beats fit into one lease."""

    def __init__(self, store: Store, member: Member, lease_ms: int) -> None:
        self._store = store
        self._member = member
        self._lease_ms = lease_ms
        self._loop = asyncio.get_running_loop()
        self._next = 0.0  # the engine's thread alone looks at it
        self._renewing: asyncio.Task[None] | None = None
        self._ended = False
        self.begun = False  # the store knows this worker

    def beat(self) -> None:
        """Called by the engine's thread after each step and idle round."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._lease_ms / 3000
            self._loop.call_soon_threadsafe(self._renew_soon)

    def _renew_soon(self) -> None:
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
        """Leaves, after what is under way: a renewal that came later would make the worker look alive."""
        self._ended = True
        if self._renewing is not None:
            await self._renewing
        try:
            await self._store.leave(self._member)
        except StoreUnavailable:
            pass  # it ends by itself
