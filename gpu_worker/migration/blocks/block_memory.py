"""Where the bytes of blocks come from and go to, as the connection between two workers sees it.

The bytes of a block are its layers, one after another (`KvShape`): on a CPU one run of memory per layer, where the
arena has them; from a GPU one run of pinned memory, into which the block was gathered. So there is no copy in Python.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

Runs = Sequence[memoryview]  # of bytes; one after another they are the bytes of a block, or of a part of it


class BlockReader(Protocol):
    """Gives out the bytes of blocks that are to be sent. Called on the thread of a sender."""

    @property
    def bytes_per_block(self) -> int: ...

    @property
    def blocks_per_turn(self) -> int:
        """How many blocks `read_blocks` may be asked for at once."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> AbstractContextManager[Iterator[Runs]]:
        """The bytes of one block after another; the iterator waits for those that have to be brought first.

        Inside the context they do not change. The caller pins the blocks until the context ends, and no longer.
        """
        ...


class BlockWriter(Protocol):
    """Gives out the memory that blocks are received in. Called on the threads of a listener."""

    @property
    def bytes_per_block(self) -> int: ...

    def open_block(self, block: int) -> Runs:
        """The memory for a block's bytes: the block itself, or a place from which `keep_block` copies it.

        May wait a while for a place, and raises an error if none becomes free.
        """
        ...

    def keep_block(self, block: int) -> None:
        """Says that the bytes are all there and right. When it returns, steps that begin later can use the block."""
        ...

    def close_block(self, block: int) -> None:
        """Says that nothing is written to the runs any more. Called once for each `open_block`, after `keep_block`."""
        ...


def part_of(runs: Runs, offset: int, length: int) -> list[memoryview]:
    """The `length` bytes from `offset` on, without a copy. Fewer, if the runs end before."""
    found: list[memoryview] = []
    for run in runs:
        if length <= 0:
            break
        size = len(run)
        if offset >= size:
            offset -= size
            continue
        found.append(run[offset : offset + length] if offset or length < size else run)
        length -= len(found[-1])
        offset = 0
    return found
