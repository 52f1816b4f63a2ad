"""The bytes of blocks on a device, for a connection to another worker, by way of memory on the host.

    source  device block ──copy out──▶ buffer ──▶ sent       the sender's thread waits for the copy, then sends
    target  received ──▶ buffer ──copy in──▶ device block    the listener's thread waits, then the block is accepted

The buffers are a staging area of fixed size, in which a block is one run of bytes: its layers, one after another. Those
for reading and those for writing are separate, so that two workers that send to each other never wait for each other.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from gpu_worker.ops import SwapTicket

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


log = logging.getLogger(__name__)

SIDE_BYTES = 16 << 20  # of the buffers for reading, and of those for writing
READERS = 4  # turns that find room at once, where blocks have 4 MiB at most: one for each connection that sends


class BlockCopier(Protocol):
    """Copies blocks between a device and the buffers of a staging area. Thread-safe. No call waits for the device."""

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        """Begins to copy blocks (block, buffer) once the steps that were run are done. None: the copies are done."""
        ...

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        """Begins to copy blocks (buffer, block) once the steps that were run are done. None: the copies are done."""
        ...


@dataclass(frozen=True, slots=True)
class StagingSize:
    for_reading: int
    for_writing: int

    @classmethod
    def of(cls, bytes_per_block: int) -> "StagingSize":
        """As many as fit a fixed number of bytes; two on each side where blocks are larger than that."""
        count = max(2, SIDE_BYTES // bytes_per_block)
        return cls(count, count)

    @property
    def num_buffers(self) -> int:
        return self.for_reading + self.for_writing

    @property
    def blocks_per_turn(self) -> int:
        return max(1, self.for_reading // READERS)


@dataclass(slots=True, eq=False)
class _ClaimedBuffers:
    """Buffers that were claimed together, and the copy that uses them, if it was begun."""

    buffers: list[int]
    copy: SwapTicket | None = None

    def wait(self) -> None:
        if self.copy is not None:
            self.copy.wait()
            self.copy = None

    def ends(self) -> bool:
        """Waits. False: the copy has failed, and may still use the buffers."""
        copy = self.copy
        try:
            self.wait()
        except Exception:
            return copy is None or is_done(copy)
        return True


def is_done(copy: SwapTicket) -> bool:
    """False also if the device cannot say."""
    try:
        return copy.is_done()
    except Exception as error:
        log.error("a copy of blocks has failed, and its buffers are not used again: %s", error)
        return False


class StagedBlocks:
    """The `BlockMemory` of a device. Any thread may call it, and waits for its own copies alone.

    The thread that runs steps never waits for these copies. Until a block is kept, and while it is read, it is held or
    pinned, so no step uses it meanwhile.
    """

    def __init__(
        self,
        copier: BlockCopier,
        memory: memoryview,
        num_blocks: int,
        size: StagingSize,
        patience_s: float = PATIENCE_S,
        read_patience_s: float = READ_PATIENCE_S,
    ) -> None:
        """`memory` has the buffers, one after another: first those for reading, then those for writing."""
        self._copier = copier
        self._memory = memory
        self._num_blocks = num_blocks
        self.bytes_per_block = len(memory) // size.num_buffers
        self.blocks_per_turn = size.blocks_per_turn
        self.read_buffers = StagingBuffers(range(size.for_reading), read_patience_s)
        self.write_buffers = StagingBuffers(range(size.for_reading, size.num_buffers), patience_s)
        self._lock = threading.Lock()
        self._written: dict[int, _ClaimedBuffers] = {}  # by block: those that are open

    @contextmanager
    def read_blocks(self, blocks: Sequence[int]) -> Iterator[Iterator[list[memoryview]]]:
        """The bytes of one block after another. The first one is copied alone: the others come while it is sent."""
        for block in blocks:
            self._require(block)
        buffers = self.read_buffers.claim(len(blocks))
        copies = [_ClaimedBuffers(part) for part in (buffers[:1], buffers[1:]) if part]
        try:
            found = dict(zip(buffers, blocks, strict=True))
            for each in copies:
                each.copy = self._copier.copy_out([(found[buffer], buffer) for buffer in each.buffers])
            yield self._contents(copies)
        finally:
            for each in copies:
                self._end(self.read_buffers, each)

    def open_block(self, block: int) -> list[memoryview]:
        """A buffer for the bytes of a block. Waits for one; raises TimeoutError."""
        self._require(block)
        written = _ClaimedBuffers(self.write_buffers.claim(1))
        with self._lock:
            if block not in self._written:
                self._written[block] = written
                return [self._bytes_of(written.buffers[0])]
        self.write_buffers.give_back(written.buffers)
        raise ValueError(f"block {block} is open already: one connection writes it")

    def keep_block(self, block: int) -> None:
        """Copies the buffer to the device, and waits until it is there."""
        written = self._written[block]
        written.copy = self._copier.copy_in([(written.buffers[0], block)])
        written.wait()

    def close_block(self, block: int) -> None:
        with self._lock:
            written = self._written.pop(block)
        self._end(self.write_buffers, written)

    def _contents(self, copies: Sequence[_ClaimedBuffers]) -> Iterator[list[memoryview]]:
        for each in copies:
            each.wait()
            for buffer in each.buffers:
                yield [self._bytes_of(buffer)]

    def _bytes_of(self, buffer: int) -> memoryview:
        return self._memory[buffer * self.bytes_per_block : (buffer + 1) * self.bytes_per_block]

    def _require(self, block: int) -> None:
        if not 0 <= block < self._num_blocks:
            raise IndexError(f"block {block} is not one of the {self._num_blocks} of the arena")

    def _end(self, buffers: StagingBuffers, copy: _ClaimedBuffers) -> None:
        """Gives buffers back. No copy of a buffer that is given out is under way."""
        if copy.ends():
            buffers.give_back(copy.buffers)
        else:
            buffers.retire(copy.buffers)
