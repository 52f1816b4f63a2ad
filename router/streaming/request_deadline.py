"""When a request ends although no worker has ended it."""

import time
from math import inf

OVERDUE_S = 1.0  # what a worker gets beyond the deadline to end its sequence; also the pause between two attempts here


class RequestDeadline:
    """The deadline of one session's request. Times are of the monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._at = inf
        self._extended = False

    def set_remaining(self, remaining_s: float) -> None:
        """The request ends after this time. Changes nothing once the deadline was extended."""
        if not self._extended:
            self._at = time.monotonic() + max(0.0, remaining_s)

    def is_past(self, now: float) -> bool:
        return now >= self._at

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
