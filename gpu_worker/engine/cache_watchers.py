"""Changes of the prefix cache as numbered cache events. Every open Watch stream is told of every change.

CacheWatchers live on the event loop.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from octavo.request.ids import BlockHash

MAX_PENDING_BYTES = 8 << 20  # of hashes; a watcher with more drops its events, and its reader starts over


class CacheEvent(NamedTuple):
    """Blocks that were stored in, or removed from, the prefix cache."""

    kind: str  # STORED or REMOVED of gpu_worker.blocks.prefix_cache
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


@dataclass(slots=True, eq=False)
class CacheWatcher:
    """One open Watch stream: the events since its last batch."""

    event_seq: int = 0
    digest: int = 0
    events: list[CacheEvent] = field(default_factory=list)
    num_bytes: int = 0  # roughly what `events` holds
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def next_batch(self, interval_s: float) -> CacheEventBatch:
        """The events since the last batch: as soon as there is one, and after `interval_s` even if there is none."""
        try:
            async with asyncio.timeout(interval_s):
                await self.wake.wait()
        except TimeoutError:
            pass
        batch = CacheEventBatch(self.event_seq, self.digest, self.events)
        self._drop_events()
        return batch

    def begin(self, snapshot: CacheSnapshot) -> CacheEventBatch:
        """The first batch: the whole cache as it is now. Later batches go on from there."""
        self._drop_events()
        return CacheEventBatch(self.event_seq, self.digest, [], snapshot)

    def add_events(self, events: Sequence[CacheEvent], event_seq: int, digest: int) -> None:
        """Keeps events for the next batch. `event_seq` is the number of the last one, `digest` the cache's after it."""
        self.event_seq, self.digest = event_seq, digest
        self.num_bytes += sum(len(event.hashes) + 1 for event in events)
        if self.num_bytes > MAX_PENDING_BYTES:
            self.events = []  # event_seq rises by more than the events that come: the reader then calls Watch again
        else:
            self.events.extend(events)
        self.wake.set()

    def _drop_events(self) -> None:
        self.wake.clear()
        self.events, self.num_bytes = [], 0


class CacheWatchers:
    """Numbers cache events and hands them to every watcher."""

    def __init__(self) -> None:
        self._watchers: set[CacheWatcher] = set()
        self._event_seq = 0
        self._digest = 0

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

    def publish_events(self, events: Sequence[CacheEvent], digest: int) -> None:
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
