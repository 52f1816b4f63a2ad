"""Which limits the workers of each model have had lately: a large worker that is gone may only be starting again.

The store keeps them, so that a router knows of workers that it has never met itself.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from math import inf

from octavo.request.errors import StoreUnavailable
from octavo.store.base import Store
from octavo.store.calls import WorkerLimits

INTERVAL_S = 0.25
NOTE_S = 5.0  # how often the store is told of workers of which it knows


class LimitsRegistry:
    """Tells the store which limits the workers have that this router has met, and knows what all routers have told."""

    def __init__(self, store: Store, present: Callable[[], set[WorkerLimits]], kept_ms: int) -> None:
        """`present` are the limits of the workers that are here now. Others are remembered for `kept_ms`."""
        self._store = store
        self._present = present
        self._kept_ms = kept_ms
        self._told: set[WorkerLimits] = set()
        self._told_at = -inf
        self._seen: list[WorkerLimits] = []

    async def keep(self) -> None:
        """One round, with the pause before the next."""
        now = time.monotonic()
        if now - self._told_at >= NOTE_S or not self._present() <= self._told:
            await self._tell(now)
        await asyncio.sleep(INTERVAL_S)

    def served_lately(self, model: str) -> bool:
        """Whether a worker served a model of this name lately, as far as the last round tells."""
        return any(limits.model == model for limits in self._seen)

    async def may_hold(self, fingerprint: str, num_tokens: int, refused_by: Collection[WorkerLimits]) -> bool:
        """Whether a worker that was here lately could hold what those cannot. True without an answer of the store."""
        try:
            await self._tell(time.monotonic())
        except StoreUnavailable:
            return True
        return any(
            limits.fingerprint == fingerprint
            and num_tokens < limits.prompt_limit
            and not any(other.holds_all_of(limits) for other in refused_by)
            for limits in self._seen
        )

    async def _tell(self, now: float) -> None:
        present = self._present()
        self._seen = await self._store.note_limits(present, self._kept_ms)
        self._told, self._told_at = present, now
