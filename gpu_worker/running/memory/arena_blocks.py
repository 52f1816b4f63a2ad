"""The bytes of an arena's blocks as runs of memory, for a connection to another worker."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class ArenaBlocks:
    """Reads and writes blocks where they lie, in an arena on a CPU: [num_layers, num_blocks, ...].

    It is a `BlockMemory`. Who calls makes sure that no step writes a block
    that is read here, and that none reads a block before it is accepted.
    """

    blocks_per_turn = 1

    def __init__(self, arena: Tensor) -> None:
        num_layers, self._num_blocks = arena.shape[:2]
        self._memory = arena.view(torch.uint8).view(-1).numpy().data
        self._run_bytes = len(self._memory) // (num_layers * self._num_blocks)
        self.bytes_per_block = num_layers * self._run_bytes

    def read_blocks(self, blocks: Sequence[int]) -> AbstractContextManager[Iterator[list[memoryview]]]:
        """The bytes of the blocks, where they lie."""
        return nullcontext(map(self.open_block, blocks))

    def open_block(self, block: int) -> list[memoryview]:
        """The bytes of a block, a run for each layer."""
        if not 0 <= block < self._num_blocks:
            raise IndexError(f"block {block} is not one of the {self._num_blocks} of the arena")
        layer_bytes = self._num_blocks * self._run_bytes
        starts = range(block * self._run_bytes, len(self._memory), layer_bytes)
        return [self._memory[start : start + self._run_bytes] for start in starts]

    def keep_block(self, block: int) -> None:
        """Does nothing: the bytes are where they belong."""

    def close_block(self, block: int) -> None:
        """Does nothing: the memory stays."""
