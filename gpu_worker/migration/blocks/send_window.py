"""How much of what was sent may be on its way to a target that has not said that it took it off the connection."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_worker.migration.blocks.frames import Refusal, failed
from octavo.request.errors import InvalidArgument

WINDOW_BYTES = 16 << 20
MOST_WINDOW_BYTES = 64 << 20
SHORT_WINDOW_BYTES = 2 << 20  # while urgent blocks are about to come


class SendWindow:
    """The lock of its sender guards it, but for `expect_urgent`, which one thread calls."""

    def __init__(self, num_bytes: int, part_bytes: int, stall_s: float) -> None:
        """Parts have `part_bytes` at most. Raises InvalidArgument."""
        if not part_bytes <= num_bytes <= MOST_WINDOW_BYTES:
            raise InvalidArgument("window_bytes", f"must be between part_bytes and {MOST_WINDOW_BYTES}")
        self.bytes_in_flight = 0
        self._num_bytes, self._part_bytes, self._stall_s = num_bytes, part_bytes, stall_s
        self._num_expected = 0  # of those that have said that urgent blocks will come
        self._credited_at = time.monotonic()

    @contextmanager
    def expect_urgent(self) -> Iterator[None]:
        """Inside it is short for what is not urgent."""
        self._num_expected += 1
        try:
            yield
        finally:
            self._num_expected -= 1

    def claim(self, length: int, *, urgent: bool) -> bool:
        """Whether a part may be sent now, which is counted then. Raises TransferFailed if the target has stalled."""
        if self.bytes_in_flight + length > self._room(urgent):
            if time.monotonic() - self._credited_at > self._stall_s:
                raise failed(Refusal.STALLED, f"the target took nothing for {self._stall_s} s")
            return False
        if not self.bytes_in_flight:
            self._credited_at = time.monotonic()
        self.bytes_in_flight += length
        return True

    def credit(self, length: int) -> None:
        """The target has taken so much."""
        self.bytes_in_flight = max(0, self.bytes_in_flight - length)
        self._credited_at = time.monotonic()

    def _room(self, urgent: bool) -> int:
        if self._num_expected and not urgent:
            return min(self._num_bytes, max(SHORT_WINDOW_BYTES, self._part_bytes))
        return self._num_bytes
