"""When a request ends although no worker has ended it, and how much earlier than its client's call it ends."""

import math
import time
from math import inf

OVERDUE_S = 1.0  # what a worker gets beyond the deadline to end its sequence; also the pause between two attempts here
USUAL_MARGIN_S, USUAL_SHARE = 0.1, 0.1  # on a quiet machine: so much, or this share of the time if that is less
MAX_MARGIN_S, MAX_SHARE = 1.0, 0.5  # however late everything is
LATENESS_FACTOR = 1.5  # the next end may be later than the latest one so far
HALF_LIFE_S = 30.0  # of a measured lateness


class RequestDeadline:
    """The deadline of one session's request. Times are of the monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._at = self._first_at = inf
        self._extended = False

    def set_first(self, remaining_s: float) -> None:
        """The request was accepted with the client's call, and ends after this time: a little before that call."""
        self._first_at = time.monotonic() + remaining_s
        self.set_remaining(remaining_s)

    def set_remaining(self, remaining_s: float) -> None:
        """The request ends after this time. Changes nothing once the deadline was extended."""
        if not self._extended:
            self._at = time.monotonic() + max(0.0, remaining_s)

    def is_past(self, now: float) -> bool:
        return now >= self._at

    def lateness(self, now: float) -> float:
        """How long ago the request should have ended: seconds above 0 after its deadline.

        Nothing is late for a client that attached to the request. A worker that hangs says nothing of this machine, so
        more than what a worker gets counts as nothing, too.
        """
        late_s = now - self._first_at
        return late_s if late_s < OVERDUE_S else -inf

    def extend_once(self) -> bool:
        """Gives the worker more time to end the sequence itself. False if it has had that time already."""
        if self._extended:
            return False
        self._extended = True
        self._at += OVERDUE_S
        return True

    def postpone(self) -> None:
        """The request is being ended here. If that fails, the deadline passes again."""
        self._at = time.monotonic() + OVERDUE_S


class DeadlineMargin:
    """How much earlier than its client's call a request ends, so that its last event arrives before the call ends.

    The margin follows how late this router is: its event loop, and the last events of requests that reached their
    deadlines. One router has one.
    """

    def __init__(self) -> None:
        self._lateness_s = 0.0
        self._measured_at = -inf

    def note_lateness(self, seconds: float, now: float) -> None:
        """Takes note that something happened so much later than it should have."""
        if seconds > self._lateness_at(now):
            self._lateness_s, self._measured_at = seconds, now

    def margin_s(self, remaining_s: float, now: float) -> float:
        """The margin of a call that ends after `remaining_s`."""
        usual_s = min(USUAL_MARGIN_S, USUAL_SHARE * remaining_s)
        return min(usual_s + LATENESS_FACTOR * self._lateness_at(now), MAX_MARGIN_S, MAX_SHARE * remaining_s)

    def _lateness_at(self, now: float) -> float:
        return self._lateness_s * math.exp2(-min((now - self._measured_at) / HALF_LIFE_S, 64.0))
