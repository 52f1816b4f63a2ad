"""A device whose copies are made as late as can be, and which notices when a buffer or a block is used too early."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from gpu_worker.running.memory.staged_blocks import StagedBlocks, StagingSize
from gpu_worker.testing.witness_runner import WitnessRunner

Bytes = NDArray[np.uint8]
JUNK = 0xA5


class CopyFailed(Exception):
    """What a device says whose copy has failed."""


@dataclass(eq=False)
class LateCopy:
    """A `SwapTicket`. The copy is made when it is waited for or a test says so, after all that were begun before."""

    copier: "LateCopier"
    buffers: list[int]
    make: Callable[[], None]
    done: bool = False
    fails: bool = False

    def is_done(self) -> bool:
        if self.fails:
            raise CopyFailed("nobody knows")
        return self.done

    def wait(self) -> None:
        if self.fails:
            raise CopyFailed("the device is gone")
        self.copier.make_copies_until(self)

    def let_device_wait(self) -> None:
        raise AssertionError("no step waits for these copies")


@dataclass(eq=False)
class LateCopier:
    """A `BlockCopier` over blocks and buffers in numpy. Buffers of a copy out are spoilt when the copy is begun.

    A copy that is begun for a buffer of an unfinished one is an error.
    """

    blocks: Bytes  # [num_blocks, bytes_per_block]
    buffers: Bytes
    under_way: list[LateCopy] = field(default_factory=list)
    num_copies: int = 0  # that were begun
    fail_begin: bool = False
    fail_wait: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> LateCopy:
        blocks, buffers = (list(side) for side in zip(*pairs, strict=True))

        def make() -> None:
            self.buffers[buffers] = self.blocks[blocks]

        with self.lock:
            copy = self._begin(buffers, make)
            self.buffers[buffers] = JUNK
            return copy

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> LateCopy:
        buffers, blocks = (list(side) for side in zip(*pairs, strict=True))

        def make() -> None:
            self.blocks[blocks] = self.buffers[buffers]

        with self.lock:
            return self._begin(buffers, make)

    def _begin(self, buffers: list[int], make: Callable[[], None]) -> LateCopy:
        if self.fail_begin:
            raise CopyFailed("the copy was not begun")
        busy = {buffer for each in self.under_way for buffer in each.buffers}
        assert busy.isdisjoint(buffers), "a buffer is used while an earlier copy of it is under way"
        copy = LateCopy(self, buffers, make, fails=self.fail_wait)
        self.under_way.append(copy)
        self.num_copies += 1
        return copy

    def make_copies_until(self, copy: LateCopy) -> None:
        with self.lock:
            while not copy.done:
                self.make_next()

    def make_next(self) -> None:
        with self.lock:
            if self.under_way:
                made = self.under_way.pop(0)
                made.make()
                made.done = True


def late_blocks(
    blocks: Bytes, size: StagingSize, patience_s: float = 5.0, kind: type[LateCopier] = LateCopier
) -> tuple[StagedBlocks, LateCopier]:
    """Staged blocks over `blocks` [num_blocks, bytes_per_block], and their copier."""
    buffers = np.full((size.num_buffers, blocks.shape[1]), JUNK, dtype=np.uint8)
    copier = kind(blocks, buffers)
    return StagedBlocks(copier, buffers.data.cast("B"), len(blocks), size, patience_s, patience_s), copier


class StagedWitness(WitnessRunner):
    """A WitnessRunner whose blocks come and go by way of a staging area, as those of a GPU, with late copies."""

    size = StagingSize(8, 3)
    copiers = LateCopier

    @cached_property
    def block_memory(self) -> StagedBlocks:
        blocks = self._arena.reshape(self.info.num_blocks, -1).view(np.uint8)
        staged, self.copier = late_blocks(blocks, self.size, kind=self.copiers)
        return staged

    def check_buffers(self) -> None:
        """No buffer is in use, and none was lost."""
        check_buffers(self.block_memory, self.size)
        assert not self.copier.under_way


def num_usable(staged: StagedBlocks) -> int:
    """Buffers of both sides that were not retired."""
    return staged.read_buffers.num_usable + staged.write_buffers.num_usable


def check_buffers(staged: StagedBlocks, size: StagingSize, num_retired: int = 0) -> None:
    """All buffers are free but those that were retired."""
    assert staged.read_buffers.num_free + staged.write_buffers.num_free == num_usable(staged)
    assert num_usable(staged) == size.num_buffers - num_retired
