"""Compares what the store says that this worker owns with what it runs, and gives the rest back to the queue.

A router may die between the take, which makes this worker the owner, and the Schedule, which would have told it. And a
store that went back in time may hold a sequence that has ended here. Nobody else would find either: the owner lives.
"""

import asyncio
import logging
from collections.abc import Callable, Collection

from octavo.request.errors import StoreUnavailable
from octavo.request.ids import Incarnation, SequenceId
from octavo.store.base import Store

log = logging.getLogger(__name__)

ROUND_S = 2.0


class Reconciler:
    """Releases what the worker owns and does not run in two rounds, one after the other, at the same epoch.

    In one round alone, a sequence may be on its way here, or may have ended since the store was read. What the worker
    runs at an older epoch than it owns is not asked about: the worker stops it when it next appends.
    """

    def __init__(
        self,
        store: Store,
        worker: Incarnation,
        running: Callable[[], Collection[SequenceId]],
        runs: Callable[[SequenceId, int], bool],
    ) -> None:
        """`running` says what the worker runs, and `runs` whether it runs, or is admitting, a sequence at an epoch."""
        self._store = store
        self._worker = worker
        self._running = running
        self._runs = runs
        self._missing: set[tuple[SequenceId, int]] = set()

    async def run(self) -> None:
        """Compares for as long as the worker lives."""
        while True:
            await asyncio.sleep(ROUND_S)
            try:
                await self.compare()
            except StoreUnavailable:
                self._missing.clear()  # what is missing after an outage has time to arrive

    async def compare(self) -> None:
        """One round."""
        owned = await self._store.owned(self._worker, list(self._running()))
        missing = {(found.seq_id, found.epoch) for found in owned if not self._runs(found.seq_id, found.epoch)}
        for seq_id, epoch in missing & self._missing:
            log.warning("sequence %s: owned at epoch %d but not run here: back into the queue", seq_id, epoch)
            await self._store.requeue(seq_id, epoch, "the worker owns it and does not run it")
        self._missing = missing
