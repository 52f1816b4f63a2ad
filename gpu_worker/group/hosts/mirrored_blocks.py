"""Which blocks of the front's host the other hosts do not have yet as they are.

Each host has an arena of all blocks. A step writes the keys and values of a host's heads there, and all of them at the
front's. What is written outside of steps, by swaps, copies and other workers, is written at the front's alone, and goes
to the other hosts before the next step.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

from gpu_worker.steps.runner import BlockMemory
from gpu_worker.steps.step_input import StepInput


class MirroredBlocks:
    """The BlockMemory of the front's host, which remembers what is written through it."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._written: set[int] = set()
        self._turn = threading.Lock()
        self.bytes_per_block = memory.bytes_per_block
        self.blocks_per_turn = memory.blocks_per_turn

    def take_written(self, step: StepInput) -> list[int]:
        """What other hosts need before this step, whose moves are done."""
        with self._turn:
            written = self._written.union(step.spoil, (to for _, to in step.swap_in), (to for _, to in step.copies))
            self._written.clear()
        return sorted(written)

    def read_blocks(self, blocks: Sequence[int]) -> AbstractContextManager[Iterator[Sequence[memoryview]]]:
        return self._memory.read_blocks(blocks)

    def open_block(self, block: int) -> Sequence[memoryview]:
        return self._memory.open_block(block)

    def keep_block(self, block: int) -> None:
        self._memory.keep_block(block)
        with self._turn:
            self._written.add(block)

    def close_block(self, block: int) -> None:
        self._memory.close_block(block)
