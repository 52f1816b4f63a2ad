"""What this router has sent to one worker and no load report contains yet, and how fast it may send replays.

A dispatch counts from the moment at which the worker is chosen. Otherwise ten requests at once would all see the same
idle worker. A dispatch stops counting at the first load report that is received after the worker has answered
ADMITTED. Nearly always that report was measured after the admission. A worker measures its load some times per
reporting interval, and answers and reports are separate streams of one connection, so a report that was measured just
before an admission can come just after its answer: then the dispatch goes uncounted until the next report. Where a
report that contains the sequence comes before the answer, the dispatch counts twice until the next report.
"""

import time
from collections import deque
from collections.abc import Hashable

RECENT_S = 5.0
REPLAY_SHARE = 0.25  # of a worker's prefill speed
IDLE_CREDIT_S = 5.0  # how long a worker that was idle counts as idle, whatever replays it has got since


class PendingDispatches:
    """The dispatches to one worker, by any key. Placement adds `num_tokens` and `num_sequences` to the last report."""

    __slots__ = ("_admitted", "_num_tokens_by_key", "_times", "num_tokens")

    def __init__(self) -> None:
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
        while self._times and self._times[0] <= time.monotonic() - RECENT_S:
            self._times.popleft()
        return len(self._times)

    def add(self, key: Hashable, num_tokens: int) -> None:
        """A sequence goes to the worker, which has `num_tokens` of it to compute."""
        self.remove(key)
        self._times.append(time.monotonic())
        self._num_tokens_by_key[key] = num_tokens
        self.num_tokens += num_tokens

    def mark_admitted(self, key: Hashable) -> None:
        """The worker has admitted the sequence: the next report counts as containing it."""
        if key in self._num_tokens_by_key:
            self._admitted.add(key)

    def remove(self, key: Hashable) -> None:
        """The worker has not admitted the sequence, or the sequence has ended. An unknown key changes nothing."""
        self.num_tokens -= self._num_tokens_by_key.pop(key, 0)
        self._admitted.discard(key)

    def remove_reported(self) -> None:
        """A load report has come, which counts as containing every admitted sequence."""
        for key in list(self._admitted):
            self.remove(key)


class ReplayPace:
    """How fast sequences of a lost worker are replayed on a worker. All times are of one monotonic clock.

    A worker computes the whole history of a replayed sequence before the sequence's next token, in the same steps in
    which it decodes its other sequences. So a busy worker gets one step's worth of replays at once, and the rest at a
    quarter of its prefill speed. A worker that had nothing to do when the first replay came gets all replays at once.
    """

    __slots__ = ("_booked_until", "_idle_until")

    def __init__(self) -> None:
        self._idle_until = 0.0
        self._booked_until = 0.0

    def book_replay(self, now: float, num_tokens: int, *, idle: bool, tokens_per_s: float, burst_tokens: int) -> float:
        """Books the next replay. Returns for how many seconds it must wait: 0 while `tokens_per_s` is not known (0)."""
        if idle:
            self._idle_until = now + IDLE_CREDIT_S
        if now < self._idle_until or tokens_per_s <= 0:
            return 0.0
        allowed = REPLAY_SHARE * tokens_per_s
        begins = max(now - burst_tokens / allowed, self._booked_until)
        self._booked_until = begins + num_tokens / allowed
        return max(0.0, begins - now)
