"""The state of the cluster for all who watch it: the router's page, and callers of Admin.WatchCluster.

Nothing is read while nobody watches. All watchers share what the router reads: a view that is young enough for one is
given to all. Nothing is kept for a watcher that reads slowly; it gets the newest view when it asks again.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import cached_property

from octavo.request.errors import Failure, ServingError, StoreUnavailable, TooManyStreams
from octavo.request.ids import Incarnation
from octavo.request.record import Record
from octavo.store.base import Store
from octavo.store.calls import QueueDepths
from octavo.v1 import admin_pb2
from octavo.wire.message_json import message_json
from octavo.wire.public import failure_to_wire
from router.admin import messages
from router.admin.move_log import MoveLog
from router.fleet.worker_pool import WorkerPool
from router.streaming.progress.progress_registry import ProgressRegistry

DEFAULT_MS = 1000
MIN_MS = 200
MAX_SEQUENCES = 200
MAX_TENANTS = 50
MAX_WATCHERS = 64
READ_S = 2.0  # how long the store may take to answer


@dataclass(frozen=True, eq=False)
class ClusterView:
    """The state of the cluster at one moment."""

    message: admin_pb2.WatchClusterResponse
    at: float

    @cached_property
    def json(self) -> bytes:
        """The message as one line of JSON, with the names of the fields as they are in the proto file."""
        return message_json(self.message)


@dataclass(frozen=True, slots=True)
class StoreReading:
    """What the store has said of sequences and the queue, or why it has not."""

    records: Sequence[Record] = ()
    has_more: bool = False
    now_ms: int = 0  # by the store's clock
    depths: QueueDepths | None = None
    failure: Failure | None = None


class ClusterWatch:
    """Makes views of the cluster while somebody watches."""

    def __init__(
        self, store: Store, router_id: Incarnation, router_name: str, pool: WorkerPool, progress: ProgressRegistry
    ) -> None:
        self.router_name = router_name
        self.num_watchers = 0
        self._store = store
        self._router_id = router_id
        self._pool = pool
        self._progress = progress
        self._moves = MoveLog(pool.name_of)
        self._latest: ClusterView | None = None
        self._reading = asyncio.Lock()
        self._began = time.monotonic()

    async def watch(self, interval_ms: int = 0) -> AsyncGenerator[ClusterView, None]:
        """A view now, and one after each interval, as fast as the caller takes them. Raises TooManyStreams."""
        if self.num_watchers >= MAX_WATCHERS:
            raise TooManyStreams(f"{MAX_WATCHERS} callers watch this router: close some of them", retry_after_ms=5000)
        interval_s = max(MIN_MS, interval_ms or DEFAULT_MS) / 1000
        self.num_watchers += 1
        try:
            due = time.monotonic()
            while True:
                yield await self._view(interval_s / 2)
                due = max(due + interval_s, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
        finally:
            self.num_watchers -= 1

    async def _view(self, max_age_s: float) -> ClusterView:
        """The latest view if it is no older than that, or else a new one."""
        async with self._reading:
            if self._latest is None or time.monotonic() - self._latest.at > max_age_s:
                self._latest = self._view_of(await self._read_store())
            return self._latest

    async def _read_store(self) -> StoreReading:
        try:
            async with asyncio.timeout(READ_S):
                depths = await self._store.tenant_depths(MAX_TENANTS)
                records = await self._store.list_sequences(None, MAX_SEQUENCES + 1)
                records.sort(key=lambda record: record.accepted_ms)
                # Any read brings the time of the store's clock, by which all times in records are.
                snapshots = [await self._store.read(record.seq_id) for record in records[-1:]]
        except TimeoutError:
            return StoreReading(failure=StoreUnavailable(f"the store has not answered for {READ_S:g} s").failure())
        except ServingError as error:
            return StoreReading(failure=error.failure())
        now_ms = snapshots[0].now_ms if snapshots and snapshots[0] else max((r.accepted_ms for r in records), default=0)
        return StoreReading(records[:MAX_SEQUENCES], len(records) > MAX_SEQUENCES, now_ms, depths)

    def _view_of(self, read: StoreReading) -> ClusterView:
        now = time.monotonic()
        self._moves.note_records(read.records, read.now_ms, now)
        links = sorted(self._pool.links.values(), key=lambda link: (link.worker_id, link.incarnation))
        message = admin_pb2.WatchClusterResponse(
            workers=[messages.worker_to_wire(link) for link in links],
            failure=None if read.failure is None else failure_to_wire(read.failure),
            router_id=self._router_id,
            router_name=self.router_name,
            up_ms=int(1000 * (now - self._began)),
            queue=None if read.depths is None else messages.queue_to_wire(read.depths),
            sequences=[messages.sequence_to_wire(record, read.now_ms) for record in read.records],
            has_more_sequences=read.has_more,
            moves=[messages.move_to_wire(move, now) for move in self._moves.moves],
            traffic=[messages.traffic_to_wire(progress) for progress in self._progress.models()],
            num_streams=self._progress.num_streams,
        )
        return ClusterView(message, now)
