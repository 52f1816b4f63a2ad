"""What this router has sent to one worker and the worker has not reported yet.

A dispatch counts from the moment of the decision, or ten requests at once would all see the same idle worker. It stops
counting when a report can be relied on to contain it: the first one received after the worker has answered ADMITTED.
Results and reports of one worker share a connection, so that report was written after the admission. Between admission
and that report a dispatch may count twice, for one reporting interval; it is never not counted.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable

RECENT_S = 5.0


class PendingDispatches:
    """Dispatches to one worker, by any key; `num_tokens` and `num_sequences` are what placement adds."""

    __slots__ = ("_admitted", "_clock", "_sent", "_times", "num_tokens")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._sent: dict[Hashable, int] = {}
        self._admitted: set[Hashable] = set()
        self._times: deque[float] = deque()
        self.num_tokens = 0

    @property
    def num_sequences(self) -> int:
        return len(self._sent)

    @property
    def num_recent(self) -> int:
        """Sent not long ago, whatever became of them: equal workers take turns."""
        while self._times and self._times[0] <= self._clock() - RECENT_S:
            self._times.popleft()
        return len(self._times)

    def sent(self, key: Hashable, num_tokens: int) -> None:
        """A request was given to the worker, with this many tokens to compute."""
        self.refused(key)
        self._times.append(self._clock())
        self._sent[key] = num_tokens
        self.num_tokens += num_tokens

    def admitted(self, key: Hashable) -> None:
        """The worker took it: the next report counts it."""
        if key in self._sent:
            self._admitted.add(key)

    def refused(self, key: Hashable) -> None:
        """The worker did not take it, or it has ended; unknown is fine."""
        self.num_tokens -= self._sent.pop(key, 0)
        self._admitted.discard(key)

    def reported(self) -> None:
        """A load report came."""
        for key in list(self._admitted):
            self.refused(key)
