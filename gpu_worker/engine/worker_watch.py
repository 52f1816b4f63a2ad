"""What routers are told of this worker: how busy it is, what its prefix cache has, and whether it drains."""

import asyncio
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from gpu_worker.blocks.prefix_cache import DEMOTED, REMOVED, STORED
from gpu_worker.engine.command_port import CommandPort
from gpu_worker.engine.step_times import StepTimes
from gpu_worker.scheduling.scheduler import Scheduler
from gpu_worker.scheduling.state.load import Load
from gpu_worker.scheduling.state.workload import Workload
from gpu_worker.steps.rank_state import RankState
from octavo.request.ids import BlockHash

REFRESH_EVERY_S = 0.05  # how often load and cache events are brought from a busy engine to the event loop
MAX_PENDING_BYTES = 8 << 20  # of hashes; a watcher with more drops its events, and its reader starts over
MAX_FILE_BYTES = 1 << 20  # of hashes of files; a watcher with more begins with all of them again
CLEARED = "cleared"


class CacheEvent(NamedTuple):
    """Blocks that were stored in, or removed from, the prefix cache."""

    kind: str  # STORED or REMOVED of gpu_worker.blocks.prefix_cache; of files also CLEARED
    hashes: bytes  # the blocks' hashes one after the other


class CacheSnapshot(NamedTuple):
    """Every hash in the prefix cache, one after the other: of blocks on the device, and of those on the host alone."""

    device_hashes: bytes
    host_hashes: bytes


@dataclass(slots=True)
class CacheEventBatch:
    """What one message of a Watch stream says of the prefix cache."""

    event_seq: int  # the number of the last event in or before this batch
    digest: int  # of the whole cache after this batch
    events: list[CacheEvent]
    snapshot: CacheSnapshot | None = None  # instead of events; in the first batch of a stream
    file_events: list[CacheEvent] = field(default_factory=list)  # of blocks in files; all of them in the first batch


@dataclass(slots=True, eq=False)
class CacheWatcher:
    """One open Watch stream: the events since its last batch."""

    event_seq: int = 0
    digest: int = 0
    events: list[CacheEvent] = field(default_factory=list)
    num_bytes: int = 0  # roughly what `events` holds
    file_events: list[CacheEvent] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def next_batch(self, interval_s: float) -> CacheEventBatch:
        """The events since the last batch: as soon as there is one, and after `interval_s` even if there is none."""
        try:
            async with asyncio.timeout(interval_s):
                await self.wake.wait()
        except TimeoutError:
            pass
        batch = CacheEventBatch(self.event_seq, self.digest, self.events, file_events=self.file_events)
        self._drop_events()
        return batch

    def begin(self, snapshot: CacheSnapshot, files: bytes) -> CacheEventBatch:
        """The first batch: the whole cache, and the hashes of files, as they are now. Later ones go on from there."""
        self._drop_events()
        file_events = [CacheEvent(STORED, files)] if files else []
        return CacheEventBatch(self.event_seq, self.digest, [], snapshot, file_events)

    def add_events(self, events: Seq[CacheEvent], event_seq: int, digest: int) -> None:
        """Keeps events for the next batch. `event_seq` is the number of the last one, `digest` the cache's after it."""
        self.event_seq, self.digest = event_seq, digest
        self.num_bytes += sum(len(event.hashes) + 1 for event in events)
        if self.num_bytes > MAX_PENDING_BYTES:
            self.events = []  # event_seq rises by more than the events that come: the reader then calls Watch again
        else:
            self.events.extend(events)
        self.wake.set()

    def add_file_events(self, events: Seq[CacheEvent], files: Callable[[], bytes]) -> None:
        """Keeps changes of files for the next batch; `files` says which there are after them."""
        self.file_events.extend(events)
        if sum(len(event.hashes) for event in self.file_events) > MAX_FILE_BYTES:
            self.file_events = [CacheEvent(CLEARED, b""), CacheEvent(STORED, files())]

    def _drop_events(self) -> None:
        self.wake.clear()
        self.events, self.num_bytes, self.file_events = [], 0, []


class CacheWatchers:
    """Numbers cache events and hands them to every open Watch stream. Lives on the event loop."""

    def __init__(self) -> None:
        self._watchers: set[CacheWatcher] = set()
        self._event_seq = 0
        self._digest = 0
        self._files: dict[BlockHash, None] = {}

    @property
    def files(self) -> bytes:
        """The hashes of all blocks in files that were published, one after the other."""
        return b"".join(self._files)

    def open_watcher(self) -> CacheWatcher:
        watcher = CacheWatcher(self._event_seq, self._digest)
        self._watchers.add(watcher)
        return watcher

    def close_watcher(self, watcher: CacheWatcher) -> None:
        self._watchers.discard(watcher)

    def wake_all(self) -> None:
        """Has every Watch stream send a message now: its load report has changed."""
        for watcher in self._watchers:
            watcher.wake.set()

    def publish_files(self, written: Seq[BlockHash], removed: Seq[BlockHash]) -> None:
        """Hands over which blocks have files now, and which have none any more."""
        self._files.update(dict.fromkeys(written))
        for block_hash in removed:
            self._files.pop(block_hash, None)
        changes = {STORED: written, REMOVED: removed}
        events = [CacheEvent(kind, b"".join(hashes)) for kind, hashes in changes.items() if hashes]
        for watcher in self._watchers:
            watcher.add_file_events(events, lambda: self.files)

    def publish_events(self, events: Seq[CacheEvent], digest: int) -> None:
        """Hands over events in the order they happened; `digest` is of the cache after them."""
        self._event_seq += len(events)
        self._digest = digest
        for watcher in self._watchers:
            watcher.add_events(events, self._event_seq, digest)


def join_events(changes: Iterable[tuple[str, BlockHash]]) -> list[CacheEvent]:
    """One event for each run of changes of the same kind."""
    runs: list[tuple[str, list[BlockHash]]] = []
    for kind, block_hash in changes:
        if not runs or runs[-1][0] != kind:
            runs.append((kind, []))
        runs[-1][1].append(block_hash)
    return [CacheEvent(kind, b"".join(hashes)) for kind, hashes in runs]


class WorkerWatch:
    """The latest load, and the open Watch streams. Lives on the event loop; the engine's thread refreshes it."""

    def __init__(self, port: CommandPort, scheduler: Scheduler, workload: Workload, times: StepTimes) -> None:
        """After construction the workload is read in commands and in `refresh` only."""
        self.draining = False  # new sequences are refused
        self.num_standby_sequences = 0  # of which other workers keep blocks; who names these blocks sets it
        self.adapters: Callable[[], Seq[str]] = tuple  # the digests of those in memory; who keeps them sets it
        self.ranks: Callable[[], Seq[RankState]] = tuple  # of a group; who knows them sets it
        self.watchers = CacheWatchers()
        self._port = port
        self._scheduler = scheduler
        self._workload = workload
        self.times = times  # of all steps until now
        self._loop = asyncio.get_running_loop()
        self._refreshed = 0.0  # the engine's thread alone uses this and _busy
        self._busy = False
        self.load = Load.of(workload)

    def note_draining(self, draining: bool) -> None:
        """Refuses new sequences from now on, or not any more. Each Watch stream says so now."""
        self.draining = draining
        self.watchers.wake_all()

    async def begin_watch(self, watcher: CacheWatcher) -> CacheEventBatch:
        """The watcher's first batch, with a snapshot of the cache; its later batches go on from there."""
        begun: asyncio.Future[CacheEventBatch] = self._loop.create_future()
        cache = self._workload.tables.cache

        def begin(snapshot: CacheSnapshot) -> None:
            if not begun.done():
                begun.set_result(watcher.begin(snapshot, self.watchers.files))

        def command(_: Scheduler) -> None:
            self.refresh()  # so that no event from before the snapshot comes after it
            hashes = (cache.block_hashes(), cache.host_hashes())
            self._loop.call_soon_threadsafe(begin, CacheSnapshot(*map(b"".join, hashes)))

        await self._port.ask(command)
        return await begun

    # On the engine's thread, between steps

    def note_round(self) -> None:
        """Refreshes now and then, and at once when the engine gets idle."""
        now, busy = time.monotonic(), self._scheduler.has_work
        if now - self._refreshed > REFRESH_EVERY_S or (self._busy and not busy):
            self._refreshed = now
            self.refresh()
        self._busy = busy

    def refresh(self) -> None:
        """Brings the load, and what the last steps changed in the prefix cache, to the event loop."""
        # The wire has no event for a block that leaves the device for the host pool. Routers count such a block as one
        # on the device until it is in neither, or until their next snapshot.
        cache = self._workload.tables.cache
        events = join_events(change for change in cache.take_events() if change[0] != DEMOTED)
        self._loop.call_soon_threadsafe(self._publish, Load.of(self._workload), events, cache.digest)

    def _publish(self, load: Load, events: Seq[CacheEvent], digest: int) -> None:
        self.load = load
        if events:
            self.watchers.publish_events(events, digest)
