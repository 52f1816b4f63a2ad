"""How many bytes a worker sends per second, over all its connections to other workers."""

import threading
import time
from collections.abc import Callable

BURST_S = 0.02  # what may be sent at once after a pause: the bytes of so much time
LONGEST_WAIT_S = 0.1  # until a sender looks whether it is still to send


class RateLimiter:
    """Lets bytes through at a rate that may change at any time; None: at any rate, 0: not at all. Thread-safe."""

    def __init__(self, bytes_per_s: float | None = None) -> None:
        self._changed = threading.Condition()
        self._rate = bytes_per_s
        self._ahead = 0.0  # bytes that were let through and that the rate has not caught up with
        self._at = time.monotonic()

    @property
    def bytes_per_s(self) -> float | None:
        return self._rate

    @bytes_per_s.setter
    def bytes_per_s(self, rate: float | None) -> None:
        with self._changed:
            self._catch_up()
            self._rate = rate
            if rate is None:
                self._ahead = 0.0
            self._changed.notify_all()

    def pass_bytes(self, count: int, stopped: Callable[[], bool]) -> bool:
        """Waits until `count` bytes may be sent, and counts them. False, soon, if `stopped` says so before."""
        with self._changed:
            while True:
                if stopped():
                    return False
                self._catch_up()
                rate = self._rate
                if rate is None:
                    return True
                late = self._ahead - rate * BURST_S
                if rate > 0 and late <= 0:
                    self._ahead += count
                    return True
                self._changed.wait(min(late / rate, LONGEST_WAIT_S) if rate > 0 else LONGEST_WAIT_S)

    def _catch_up(self) -> None:
        now = time.monotonic()
        self._ahead = max(0.0, self._ahead - (self._rate or 0.0) * (now - self._at))
        self._at = now
