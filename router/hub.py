"""Which sessions on this router wait for which sequence. What workers and the store say is handed on by seq_id."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from octavo.ids import Incarnation, SequenceId


TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Placed:
    """A worker runs the sequence, and its Step stream carries it to this router."""

    epoch: int
    owner: Incarnation


class Listener(Protocol):
    """What a session lets others tell it. `item` is a worker's StepItem; only session.py looks inside."""

    seq_id: SequenceId

    def deliver(self, item: object) -> None: ...
    def placed(self, placed: Placed) -> None: ...
    def check(self) -> None:
        """Something changed: read the record."""
        ...

    def tick(self, now: float) -> None:
        """Time has passed."""
        ...


class Hub:
    """Sessions by sequence. Lives on the event loop."""

    def __init__(self) -> None:
        self._listeners: dict[SequenceId, list[Listener]] = {}
        self.now = time.monotonic()  # as of the last tick: coarse, and cheaper than a timer per token

    async def run(self) -> None:
        """Tells all sessions the time, for as long as the router lives."""
        while True:
            await asyncio.sleep(TICK_S)
            self.now = time.monotonic()
            for listeners in list(self._listeners.values()):
                for listener in list(listeners):
                    listener.tick(self.now)

    def add(self, listener: Listener) -> None:
        self._listeners.setdefault(listener.seq_id, []).append(listener)

    def remove(self, listener: Listener) -> bool:
        """Whether it was the last one of its sequence."""
        listeners = self._listeners.get(listener.seq_id, [])
        if listener in listeners:
            listeners.remove(listener)
        if not listeners:
            self._listeners.pop(listener.seq_id, None)
        return not listeners

    def __contains__(self, seq_id: SequenceId) -> bool:
        return seq_id in self._listeners

    def __len__(self) -> int:
        return len(self._listeners)

    def seq_ids(self) -> list[SequenceId]:
        return list(self._listeners)

    def deliver(self, seq_id: SequenceId, item: object) -> bool:
        """Hands a worker's item on; False when nobody here wants it."""
        listeners = self._listeners.get(seq_id)
        if listeners is None:
            return False
        for listener in listeners:
            listener.deliver(item)
        return True

    def placed(self, seq_id: SequenceId, placed: Placed) -> None:
        for listener in self._listeners.get(seq_id, ()):
            listener.placed(placed)

    def check(self, seq_ids: Iterable[SequenceId]) -> None:
        for seq_id in seq_ids:
            for listener in self._listeners.get(seq_id, ()):
                listener.check()
