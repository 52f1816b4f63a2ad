"""The memory that blocks lie in: one tensor on the device, and one of the same form on the host for swapped blocks.

Other threads copy blocks between the device and a staging area beside the steps (`StepMark`, `ArenaCopier`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gpu_worker.ops import Ops, SwapTicket, kv_format
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.ops.native_cpu import NativeCpuOps
from gpu_worker.running.memory.pages_ahead import PagesAhead
from gpu_worker.running.memory.staged_blocks import StagedBlocks, StagingSize
from gpu_worker.steps.runner import BlocksInPlace


class StepMark:
    """Marks where the last step that was run ends in the work of a device, so that copies begin after it.

    They do not wait for the step under way. On a CPU nothing has to wait.

    A step that has been run may still be computing: the engine's thread does not wait for a piece of a prompt. Blocks
    may be held or pinned while a step runs. That step uses only blocks of its tables, and writes to none that is
    pinned, so the steps before the mark are all that copies have to wait for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stepped: torch.cuda.Event | None = None
        if device.type == "cuda":
            with torch.cuda.device(device):
                self._stepped = torch.cuda.Event()
                self._stream = torch.cuda.Stream(device)
                self.note_steps()  # what has set the memory up

    def note_steps(self) -> None:
        """Sets the mark: all work of a step is queued on the current stream. The engine's thread calls it."""
        if self._stepped is not None:
            self._stepped.record()

    @contextmanager
    def after_steps(self) -> Iterator[None]:
        """Inside, a stream of the device is current whose work begins when the work before the mark is done.

        Any thread may call it, and none waits.
        """
        if self._stepped is None:
            yield
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_event(self._stepped)
            yield

    def wait_for_copies(self) -> None:
        """Waits for the work that was queued inside `after_steps`."""
        if self._stepped is not None:
            self._stream.synchronize()


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


class KvArena:
    """The blocks on the device and on the host. The arena copies blocks; the block manager knows who uses which."""

    def __init__(
        self,
        shape: KvShape,
        num_blocks: int,
        num_host_blocks: int,
        device: torch.device,
        ops: Ops,
        on_device: Tensor | None = None,
        on_host: Tensor | None = None,
    ) -> None:
        """`on_device` and `on_host` are the blocks there, of one form; None: they are allocated here."""
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self._ops = ops
        cpu, pinned = torch.device("cpu"), device.type == "cuda"
        self._device = shape.allocate_arena(num_blocks, device) if on_device is None else on_device
        self._host = shape.allocate_arena(num_host_blocks, cpu, pinned) if on_host is None else on_host
        self._pages = self._host_pages = None
        if isinstance(ops, NativeCpuOps):  # memory that is given here is a group's
            if on_host is None:
                self._host_pages = PagesAhead(self._host, ops.extension.populate_blocks)
            if on_device is None:
                self._pages = PagesAhead(self._device, ops.extension.populate_blocks)
        self.layers: list[Tensor] = list(self._device.unbind(0))

    @property
    def on_device(self) -> Tensor:
        """The blocks there: [num_layers, num_blocks, ...]."""
        return self._device

    def expect_writes(self, slots: Sequence[int]) -> None:
        """A step is about to write to these slots on the device: memory for later ones is faulted in meanwhile."""
        if self._pages is not None and slots and not self._pages.is_done:
            self._pages.note(max(slots) // self.shape.block_size)

    def blocks_in_place(self) -> BlocksInPlace:
        """The bytes of the blocks where they lie. The device must be a CPU."""
        return BlocksInPlace(
            self._device.view(torch.uint8).view(-1).numpy().data, self.num_blocks, self.shape.arena_layers
        )

    def staged_blocks(self, mark: StepMark) -> StagedBlocks:
        """The bytes of the blocks by way of memory on the host, which this call allocates."""
        return staged_blocks(self._ops, self._device, mark)

    def swap_out(self, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        """Copies device blocks to host blocks. None: the copies are done."""
        if self._host_pages is not None and pairs and not self._host_pages.is_done:
            self._host_pages.note(max(host for _, host in pairs))
        return self._ops.swap_blocks(self._device, self._host, pairs)

    def swap_in(self, pairs: Sequence[tuple[int, int]]) -> SwapTicket | None:
        """Copies host blocks to device blocks. None: the copies are done."""
        return self._ops.swap_blocks(self._host, self._device, pairs)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies device blocks to device blocks. All are read before one is written."""
        self._ops.copy_blocks(self._device, pairs)

    def spoil(self, block_ids: Sequence[int]) -> None:
        """Fills blocks with NaN, so that a read before the next write shows."""
        if block_ids:
            index = torch.tensor(block_ids, dtype=torch.int64, device=self._device.device)
            memory, value = kv_format.spoiling(self._device)
            memory.index_fill_(1, index, value)

    def close(self) -> None:
        """Called once, when no step and no copy will use the blocks any more."""
        self.layers.clear()
