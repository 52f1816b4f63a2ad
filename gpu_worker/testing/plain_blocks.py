"""The bytes of a test runner's blocks, for a connection to another worker."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext


class PlainBlocks:
    """The `BlockMemory` of blocks that lie one after another in one piece of memory."""

    blocks_per_turn = 1

    def __init__(self, memory: memoryview, num_blocks: int) -> None:
        self._memory = memory.cast("B")
        self._num_blocks = num_blocks
        self.bytes_per_block = len(self._memory) // num_blocks

    def read_blocks(self, blocks: Sequence[int]) -> AbstractContextManager[Iterator[list[memoryview]]]:
        """The bytes of the blocks, where they lie."""
        return nullcontext(map(self.open_block, blocks))

    def open_block(self, block: int) -> list[memoryview]:
        """The bytes of a block, in one run."""
        if not 0 <= block < self._num_blocks:
            raise IndexError(f"block {block} is not one of the {self._num_blocks}")
        return [self._memory[block * self.bytes_per_block : (block + 1) * self.bytes_per_block]]

    def keep_block(self, block: int) -> None:
        """Does nothing: the bytes are where they belong."""

    def close_block(self, block: int) -> None:
        """Does nothing: the memory stays."""
