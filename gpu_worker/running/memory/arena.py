"""The memory that blocks lie in: one tensor on the device, and one of the same form on the host for swapped blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.ops import Ops, SwapTicket, kv_format
from gpu_worker.ops.kv_shape import KvShape
from gpu_worker.running.memory.arena_blocks import ArenaBlocks
from gpu_worker.running.memory.arena_copier import staged_blocks
from gpu_worker.running.memory.staged_blocks import StagedBlocks
from gpu_worker.running.memory.step_mark import StepMark


class KvArena:
    """The blocks on the device and on the host. The arena copies blocks; the block manager knows who uses which."""

    def __init__(self, shape: KvShape, num_blocks: int, num_host_blocks: int, device: torch.device, ops: Ops) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._ops = ops
        cpu, pinned = torch.device("cpu"), device.type == "cuda"
        self._device = shape.allocate_arena(num_blocks, device)
        self._host = shape.allocate_arena(num_host_blocks, cpu, pinned)
        self.layers: list[Tensor] = list(self._device.unbind(0))

    def blocks_in_place(self) -> ArenaBlocks:
        """The bytes of the blocks where they lie. The device must be a CPU."""
        return ArenaBlocks(self._device)

    def staged_blocks(self, mark: StepMark) -> StagedBlocks:
        """The bytes of the blocks by way of memory on the host, which this call allocates."""
        return staged_blocks(self._ops, self._device, mark)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        """Copies device blocks to host blocks. None: the copies are done."""
        return self._ops.swap_blocks(self._device, self._host, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        """Copies host blocks to device blocks. None: the copies are done."""
        return self._ops.swap_blocks(self._host, self._device, pairs)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies device blocks to device blocks. All are read before one is written."""
        self._ops.copy_blocks(self._device, pairs)

    def poison(self, block_ids: Sequence[int]) -> None:
        """Fills blocks with NaN, so that a read before the next write shows."""
        if block_ids:
            index = torch.tensor(block_ids, dtype=torch.int64, device=self._device.device)
            memory, value = kv_format.poison(self._device)
            memory.index_fill_(1, index, value)
