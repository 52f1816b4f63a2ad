"""Who watches the prefix cache: KV events, numbered, to every open Watch stream."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

MAX_PENDING_EVENTS = 65536  # a watcher this far behind starts over with a snapshot

Event = tuple[str, bytes]  # ("stored" | "removed", hashes joined) or ("cleared", b"")


@dataclass(slots=True)
class Batch:
    event_seq: int
    digest: int
    events: list[Event]


@dataclass(slots=True, eq=False)
class Watcher:
    """One open Watch stream: the events since its last message."""

    event_seq: int = 0
    digest: int = 0
    events: list[Event] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    async def next(self, interval_s: float) -> Batch:
        """What has come, at once if there are events, after the interval at the latest."""
        try:
            await asyncio.wait_for(self.wake.wait(), interval_s)
        except TimeoutError:
            pass
        self.wake.clear()
        events, self.events = self.events, []
        return Batch(self.event_seq, self.digest, events)


class Watchers:
    """Numbers events and hands them to every watcher. Lives on the event loop."""

    def __init__(self) -> None:
        self._watchers: set[Watcher] = set()
        self._event_seq = 0
        self._digest = 0

    def open(self) -> Watcher:
        watcher = Watcher(self._event_seq, self._digest)
        self._watchers.add(watcher)
        return watcher

    def close(self, watcher: Watcher) -> None:
        self._watchers.discard(watcher)

    def publish(self, events: Sequence[Event], digest: int) -> None:
        """Events in order; runs of one kind may be joined by the caller. Each counts as one."""
        self._event_seq += len(events)
        self._digest = digest
        for watcher in self._watchers:
            watcher.events.extend(events)
            watcher.event_seq = self._event_seq
            watcher.digest = digest
            if len(watcher.events) > MAX_PENDING_EVENTS:
                watcher.events = [("cleared", b"")]  # the digest will not match: the reader starts over
            watcher.wake.set()
