"""What this router has sent to one worker, and what no load report of that worker contains yet.

A dispatch counts from the moment at which the worker is chosen. Otherwise ten requests at once would all see the same
idle worker. A dispatch stops counting at the first load report that is received after the worker has answered
ADMITTED. Answers and reports of one worker share a connection, so that report was written after the admission.
Between the admission and that report a dispatch may count twice, for one reporting interval. It never goes uncounted.
"""

import time
from collections import deque
from collections.abc import Callable, Hashable

RECENT_S = 5.0


class PendingDispatches:
    """The dispatches to one worker, by any key. Placement adds `num_tokens` and `num_sequences` to the last report."""

    __slots__ = ("_admitted", "_clock", "_num_tokens_by_key", "_times", "num_tokens")

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._num_tokens_by_key: dict[Hashable, int] = {}
        self._admitted: set[Hashable] = set()
        self._times: deque[float] = deque()
        self.num_tokens = 0

    @property
    def num_sequences(self) -> int:
        return len(self._num_tokens_by_key)

    @property
    def num_recent(self) -> int:
        """Dispatches of the last RECENT_S seconds, admitted or not: by this number equal workers take turns."""
        while self._times and self._times[0] <= self._clock() - RECENT_S:
            self._times.popleft()
        return len(self._times)

    def add(self, key: Hashable, num_tokens: int) -> None:
        """A sequence goes to the worker, which has `num_tokens` of it to compute."""
        self.remove(key)
        self._times.append(self._clock())
        self._num_tokens_by_key[key] = num_tokens
        self.num_tokens += num_tokens

    def mark_admitted(self, key: Hashable) -> None:
        """The worker has admitted the sequence: the next report contains it."""
        if key in self._num_tokens_by_key:
            self._admitted.add(key)

    def remove(self, key: Hashable) -> None:
        """The worker has not admitted the sequence, or the sequence has ended. An unknown key changes nothing."""
        self.num_tokens -= self._num_tokens_by_key.pop(key, 0)
        self._admitted.discard(key)

    def remove_reported(self) -> None:
        """A load report has come, which contains every admitted sequence."""
        for key in list(self._admitted):
            self.remove(key)
