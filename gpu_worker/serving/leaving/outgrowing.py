"""How a sequence leaves a worker that has become too small for it, where the model has larger workers.

A worker in which a sequence fills all blocks can compute no further token of it. The scheduler ends it with LENGTH,
unless a larger worker can go on with it: then it is released, and its router gives it to that worker.
"""

import asyncio
import time
from math import inf

from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.serving.leaving.releaser import SequenceReleaser
from octavo.request.errors import StoreUnavailable
from octavo.store.base import Store

ROUND_S = 0.05
LIMITS_S = 2.0  # how often the store is asked how large the other workers are
KEPT_MS = 24 * 3600 * 1000  # routers decide for how long workers that are gone are remembered


class OutgrownRelease:
    """Keeps the scheduler told of the largest worker of its model, and releases what it has handed over."""

    def __init__(self, store: Store, workload: Workload, releaser: SequenceReleaser) -> None:
        self._store = store
        self._workload = workload
        self._releaser = releaser
        self._asked_at = -inf

    async def run(self) -> None:
        """For as long as the worker lives."""
        while True:
            if time.monotonic() - self._asked_at >= LIMITS_S:
                await self._ask()
            if self._releaser.has_stopped:
                await self._releaser.release_stopped()
            if self._workload.outgrown:
                await self._releaser.release_outgrown()
            await asyncio.sleep(ROUND_S)

    async def _ask(self) -> None:
        self._asked_at = time.monotonic()
        try:
            seen = await self._store.note_limits((), KEPT_MS)
        except StoreUnavailable:
            return
        own = self._workload.info.fingerprint
        self._workload.larger_limit = max((each.prompt_limit for each in seen if each.fingerprint == own), default=0)
