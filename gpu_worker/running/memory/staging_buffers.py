"""Which buffers of a staging area are in use. Each holds the bytes of one block that leaves for, or comes from, another
worker.
"""

import threading
import time
from collections.abc import Iterable

# Connections give each other up after 3 s. Who receives waits for less, so that its source does not give it up. Who
# sends waits for longer, so that a target that hangs, and holds buffers up to then, fails its own tickets alone.
PATIENCE_S = 2.0
READ_PATIENCE_S = 3.5


class StagingBuffers:
    """Buffers for a block each, known by their numbers. Thread-safe."""

    def __init__(self, buffers: range, patience_s: float = PATIENCE_S) -> None:
        self._changed = threading.Condition()
        self._free = list(buffers)
        self._num_usable = len(buffers)
        self.patience_s = patience_s

    @property
    def num_free(self) -> int:
        with self._changed:
            return len(self._free)

    @property
    def num_usable(self) -> int:
        """All but the retired ones."""
        return self._num_usable

    def claim(self, count: int) -> list[int]:
        """So many buffers at once, which are the caller's until it gives them back or retires them.

        Waits for them. Raises TimeoutError, or RuntimeError if there will never be so many.
        """
        deadline = time.monotonic() + self.patience_s
        with self._changed:
            while len(self._free) < count:
                if count > self._num_usable:
                    raise RuntimeError(
                        f"{count} blocks at once, of {self._num_usable}: copies of this device have failed"
                    )
                if not self._changed.wait(deadline - time.monotonic()) and len(self._free) < count:
                    raise TimeoutError(f"no buffers for {count} blocks became free in {self.patience_s} s")
            return [self._free.pop() for _ in range(count)]

    def give_back(self, buffers: Iterable[int]) -> None:
        """Makes claimed buffers free again. No copy reads or writes them any more."""
        with self._changed:
            self._free += buffers
            self._changed.notify_all()

    def retire(self, buffers: Iterable[int]) -> None:
        """Never gives claimed buffers out again: a copy that failed may still read or write them."""
        with self._changed:
            self._num_usable -= len(list(buffers))
            self._changed.notify_all()
