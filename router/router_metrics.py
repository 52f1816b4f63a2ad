"""The metrics of a router, read from what its parts have counted."""

import asyncio
from collections import Counter
from collections.abc import Iterator

from octavo.errors import StoreUnavailable
from octavo.metrics.value import MetricValue
from octavo.record import AdmissionOutcome
from octavo.store.base import Store
from octavo.store.calls import QueueDepth, TakeReason
from router.fleet.worker_link import WorkerLink
from router.fleet.worker_pool import WorkerPool
from router.placing.assigner import Assigner
from router.streaming.request_progress import ProgressRegistry

DEPTH_INTERVAL_S = 1.0
STATES = ("available", "unavailable", "draining", "lost")


class RouterMetrics:
    """A source of metric values, which asks the store now and then how much waits for any router."""

    def __init__(self, store: Store, pool: WorkerPool, assigner: Assigner, progress: ProgressRegistry) -> None:
        self._store = store
        self._pool = pool
        self._assigner = assigner
        self._progress = progress
        self._depth: QueueDepth | None = None

    async def read_depth(self) -> None:
        """Asks the store once, and waits. The router repeats this for as long as it lives."""
        try:
            self._depth = await self._store.queue_depth()
        except StoreUnavailable:
            self._depth = None  # no value is better than an old one
        await asyncio.sleep(DEPTH_INTERVAL_S)

    def values(self) -> Iterator[MetricValue]:
        """All values of now."""
        yield from self._progress.values()
        if self._depth is not None:
            yield MetricValue("octavo_queue_requests", self._depth.num_queued)
            yield MetricValue("octavo_queue_tokens", self._depth.queued_tokens)
        for reason in TakeReason:
            yield MetricValue("octavo_takes_total", self._assigner.takes[reason], (reason.value,))
        for outcome in AdmissionOutcome:
            yield MetricValue("octavo_admissions_total", self._assigner.answers[outcome], (outcome.value,))
        yield MetricValue("octavo_admissions_total", self._assigner.num_unanswered, ("none",))
        states = Counter(_state_of(link) for link in self._pool.links.values())
        for state in STATES:
            yield MetricValue("octavo_workers", states[state], (state,))
        index = self._pool.kv_index
        yield MetricValue("octavo_kv_index_blocks", index.num_device_blocks, ("device",))
        yield MetricValue("octavo_kv_index_blocks", index.num_host_blocks, ("host",))


def _state_of(link: WorkerLink) -> str:
    if link.lost:
        return "lost"
    if link.load.draining:
        return "draining"
    return "available" if link.view().available else "unavailable"
