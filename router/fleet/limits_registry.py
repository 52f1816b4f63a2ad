"""Which limits the workers of each model have had lately: a large worker that is gone may only be starting again.

The store keeps them, so that a router knows of workers that it has never met itself.
"""

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf

from octavo.request.errors import StoreUnavailable
from octavo.store.base import Store
from octavo.store.calls import WorkerLimits

INTERVAL_S = 0.25
NOTE_S = 5.0  # how often the store is told of workers of which it knows


@dataclass(eq=False)
class LimitsRegistry:
    """Tells the store which limits the workers have that this router has met, and knows what all routers have told."""

    store: Store
    present: Callable[[], set[WorkerLimits]]  # the limits of the workers that are here now
    kept_ms: int  # how long others are remembered
    _told: set[WorkerLimits] = field(default_factory=set)
    _told_at: float = -inf
    _seen: list[WorkerLimits] = field(default_factory=list)

    async def keep(self) -> None:
        """One round, with the pause before the next."""
        now = time.monotonic()
        if now - self._told_at >= NOTE_S or not self.present() <= self._told:
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
        present = self.present()
        self._seen = await self.store.note_limits(present, self.kept_ms)
        self._told, self._told_at = present, now
