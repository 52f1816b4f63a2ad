"""Copies blocks between an arena and the buffers of its staging area, by the op that swaps blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.ops import Ops, SwapTicket
from gpu_worker.running.memory.staged_blocks import StagedBlocks, StagingSize
from gpu_worker.running.memory.step_mark import StepMark


class ArenaCopier:
    """A `BlockCopier`. Its copies and those of swaps are made in the order in which they were begun, on one stream.

    So a block is not written while a swap still reads it, and not read before a swap has written it.
    """

    def __init__(self, ops: Ops, arena: Tensor, staging: Tensor, mark: StepMark) -> None:
        """`arena` is [num_layers, num_blocks, ...], `staging` [num_layers, num_buffers, ...] in memory on the host."""
        self._ops = ops
        self._arena = arena
        self._staging = staging
        self._mark = mark

    def copy_out(self, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        return self._copy(self._arena, self._staging, pairs)

    def copy_in(self, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        return self._copy(self._staging, self._arena, pairs)

    def _copy(self, source: Tensor, target: Tensor, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        with self._mark.after_steps():
            copy = self._ops.swap_blocks(source, target, pairs)
            if copy is None:
                self._mark.wait_for_copies()  # ops without a stream for copies queue them on the current one
            return copy


def staged_blocks(ops: Ops, arena: Tensor, mark: StepMark) -> StagedBlocks:
    """The blocks of an arena [num_layers, num_blocks, ...] by way of a new staging area, pinned where that matters."""
    num_layers, num_blocks = arena.shape[:2]
    size = StagingSize.of(arena.numel() * arena.element_size() // num_blocks)
    buffers = (size.num_buffers, num_layers, *arena.shape[2:])
    staging = torch.zeros(buffers, dtype=arena.dtype, pin_memory=arena.device.type == "cuda")
    memory = staging.view(torch.uint8).view(-1).numpy().data
    return StagedBlocks(ArenaCopier(ops, arena, staging.transpose(0, 1), mark), memory, num_blocks, size)
