"""Who watches the prefix cache: KV events, numbered, to every open Watch stream."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_PENDING_BYTES = 8 << 20  # of hashes; a watcher this far behind has a gap in its numbers and starts over

Event = tuple[str, bytes]  # ("stored" | "removed", hashes joined)


@dataclass(slots=True)
class CacheEventBatch:
    """Events up to number `event_seq`, and the digest of the cache after them."""

    event_seq: int
    digest: int
    events: list[Event]


@dataclass(slots=True, eq=False)
class CacheWatcher:
    """One open Watch stream: the events since its last message."""

    event_seq: int = 0
    digest: int = 0
    events: list[Event] = field(default_factory=list)
    num_bytes: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def next_batch(self, interval_s: float) -> CacheEventBatch:
        """What has come, at once if there are events, after the interval at the latest."""
        try:
            async with asyncio.timeout(interval_s):
                await self.wake.wait()
        except TimeoutError:
            pass
        return self.take_batch()

    def take_batch(self) -> CacheEventBatch:
        self.wake.clear()
        batch = CacheEventBatch(self.event_seq, self.digest, self.events)
        self.events, self.num_bytes = [], 0
        return batch

    def add_events(self, events: Sequence[Event], event_seq: int, digest: int) -> None:
        self.event_seq, self.digest = event_seq, digest
        self.num_bytes += sum(len(hashes) + 1 for _, hashes in events)
        if self.num_bytes > MAX_PENDING_BYTES:
            self.events = []  # the numbers of those are missing: the reader notices, and asks for a snapshot
        else:
            self.events.extend(events)
        self.wake.set()


class CacheWatchers:
    """Numbers events and hands them to every watcher. Lives on the event loop."""

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

    def publish_events(self, events: Sequence[Event], digest: int) -> None:
        """Events in order; runs of one kind may be joined by the caller. Each counts as one."""
        self._event_seq += len(events)
        self._digest = digest
        for watcher in self._watchers:
            watcher.add_events(events, self._event_seq, digest)
