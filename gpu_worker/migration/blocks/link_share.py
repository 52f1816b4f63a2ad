"""How fast blocks may leave this worker, so that the sequences which run here are not disturbed.

While nothing else decodes, blocks leave as fast as the link takes them, or as fast as a setting allows. While other
sequences decode, a delivery of more than PROBE_BYTES gets a share of the link: its first PROBE_BYTES go at full speed,
and the time until the target has accepted them is the measure of the link; the rest goes at SHARE of that speed. A
measurement holds for FRESH_S, and of several the fastest counts, because whatever else happens only makes one slower.
A smaller delivery takes some milliseconds, and a stopped sequence waits for its last blocks: neither is held back. Nor
is a worker that drains: whoever decodes there is to leave soon.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

BURST_S = 0.02  # what may be sent at once after a pause: the bytes of so much time
LONGEST_WAIT_S = 0.1  # until a sender looks whether it is still to send
SHARE = 0.25
PROBE_BYTES = 4 << 20
FRESH_S = 30.0


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
                wait_s = self._wait_s()
                if not wait_s:
                    self._count(count)
                    return True
                self._changed.wait(wait_s)

    @property
    def has_room(self) -> bool:
        """Whether bytes may be sent now."""
        with self._changed:
            return not self._wait_s()

    def count_bytes(self, count: int) -> None:
        """Counts bytes that are sent without waiting: others wait for longer."""
        with self._changed:
            self._count(count)

    def _count(self, count: int) -> None:
        if self._rate is not None:
            self._ahead += count

    def _wait_s(self) -> float:
        """How long to wait before anything may be sent, or the rate is to be looked at again; 0.0: not at all."""
        self._catch_up()
        rate = self._rate
        if rate is None:
            return 0.0
        late = max(0.0, self._ahead - rate * BURST_S)
        return min(late / rate, LONGEST_WAIT_S) if rate > 0 else LONGEST_WAIT_S

    def _catch_up(self) -> None:
        now = time.monotonic()
        self._ahead = max(0.0, self._ahead - (self._rate or 0.0) * (now - self._at))
        self._at = now


class LinkShare:
    """Sets the rate of a limiter, which all connections of this worker share."""

    def __init__(self, most_bytes_per_s: float | None, is_busy: Callable[[], bool]) -> None:
        """`most_bytes_per_s` is never exceeded, unless it is None. `is_busy` says whether other sequences decode."""
        self.limiter = RateLimiter(most_bytes_per_s)
        self._most = most_bytes_per_s
        self._is_busy = is_busy
        self._num_shared = 0  # deliveries under way that get a share
        self._num_urgent = 0
        self._measured: float | None = None  # bytes per second
        self._measured_at = 0.0

    def probe_bytes(self, num_bytes: int) -> int:
        """How much of a delivery goes ahead to measure the link. 0: nothing is to be measured."""
        fresh = self._measured is not None and time.monotonic() - self._measured_at < FRESH_S
        return PROBE_BYTES if num_bytes > PROBE_BYTES and not fresh and self._is_busy() else 0

    def note_delivery(self, num_bytes: int, seconds: float) -> None:
        """Notes how long the target took to accept a delivery that was sent at full speed."""
        now, speed = time.monotonic(), num_bytes / max(seconds, 1e-6)
        fresh = now - self._measured_at < FRESH_S
        if self._measured is None or not fresh or speed > self._measured:
            self._measured, self._measured_at = speed, now

    @contextmanager
    def delivery(self, num_bytes: int, *, urgent: bool = False) -> Iterator[None]:
        """A delivery is under way inside; `adjust` is to be called now and then until it is over."""
        shared = not urgent and num_bytes > PROBE_BYTES
        self._num_shared += shared
        self._num_urgent += urgent
        self.adjust()
        try:
            yield
        finally:
            self._num_shared -= shared
            self._num_urgent -= urgent
            self.adjust()

    def adjust(self) -> None:
        """Sets the rate for the deliveries that are under way now."""
        rate = self._most
        if self._num_shared and not self._num_urgent and self._measured is not None and self._is_busy():
            share = SHARE * self._measured
            rate = share if rate is None else min(rate, share)
        if rate != self.limiter.bytes_per_s:
            self.limiter.bytes_per_s = rate
