"""The blocks of a group whose ranks have a device each: a rank's heads on its device, whole blocks on the host.

    device of rank 0   heads 0 and 1 of each block ─┐
    device of rank 1   heads 2 and 3 of each block ─┴─ copies ─▶ whole blocks: host pool, staging area

Memory on the host is mapped by all ranks, so what is swapped out, and what other workers get and give, has the layout
of one device. Rank 0 orders copies, and each rank makes those of its own heads.
"""

import logging
import os
import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gpu_worker.models.decoders.ranks.device_team import COPY, SPOIL, STAGED, SWAP_IN, SWAP_OUT, SWAPPED, DeviceTeam
from gpu_worker.models.decoders.ranks.place import TeamBroken
from gpu_worker.ops import Ops, SwapTicket
from gpu_worker.ops.kv_format import KvShape
from gpu_worker.running.memory.arena import ArenaCopier, KvArena, StepMark
from gpu_worker.running.memory.staged_blocks import BlockCopier, StagedBlocks, StagingSize

log = logging.getLogger(__name__)

LOOK_S = 50e-6  # how often somebody who waits for other ranks' copies looks
HEADER = struct.Struct("=3q")  # of an order for the staging area: in or out, its number, how many pairs follow
Pairs = Sequence[tuple[int, int]]


class GroupTicket:
    """Copies of all ranks."""

    def __init__(self, own: SwapTicket | None, team: DeviceTeam, kind: int, number: int) -> None:
        self._own = own
        self._team = team
        self._kind = kind
        self._number = number

    def is_done(self) -> bool:
        return (self._own is None or self._own.is_done()) and self._team.have_copied(self._kind, self._number)

    def wait(self) -> None:
        """Raises TeamBroken."""
        if self._own is not None:
            self._own.wait()
        while not self._team.have_copied(self._kind, self._number):
            if self._team.trouble:
                raise TeamBroken(self._team.trouble)
            time.sleep(LOOK_S)

    def let_device_wait(self) -> None:
        """The own device: others wait for their own copies as they come to the blocks."""
        if self._own is not None:
            self._own.let_device_wait()


class GroupCopier:
    """A BlockCopier of rank 0: all ranks copy, each by a thread beside its steps."""

    def __init__(self, own: BlockCopier, team: DeviceTeam) -> None:
        self._own = own
        self._team = team
        self._pipes = team.place.pipes
        for pipe in self._pipes:
            os.set_blocking(pipe, False)
        self._closing = False
        self._turn = threading.Lock()
        self._number = 0

    def close(self) -> None:
        """No copy begins from here on."""
        self._closing = True
        with self._turn:
            for pipe in self._pipes:
                os.close(pipe)

    def copy_out(self, pairs: Pairs) -> SwapTicket | None:
        return self._copy(0, pairs)

    def copy_in(self, pairs: Pairs) -> SwapTicket | None:
        return self._copy(1, pairs)

    def _copy(self, into: int, pairs: Pairs) -> SwapTicket | None:
        with self._turn:
            self._number = number = self._number + 1
            order = HEADER.pack(into, number, len(pairs)) + struct.pack(
                f"={2 * len(pairs)}q", *chain.from_iterable(pairs)
            )
            try:
                for pipe in self._pipes:
                    self._write(pipe, order)
            except OSError as error:
                raise TeamBroken(f"a rank takes no orders any more: {error}") from error
        own = self._own.copy_in(pairs) if into else self._own.copy_out(pairs)
        return GroupTicket(own, self._team, STAGED, number)

    def _write(self, pipe: int, order: bytes) -> None:
        """The pipe of a rank that is stopped may be full."""
        while order:
            if self._closing or self._team.trouble:
                raise TeamBroken(self._team.trouble or "the group was closed")
            try:
                order = order[os.write(pipe, order) :]
            except BlockingIOError:
                time.sleep(LOOK_S)


class RankArena(KvArena):
    """The own heads of each block, whose moves are those of all ranks where this one is rank 0."""

    def __init__(
        self, shape: KvShape, num_blocks: int, num_host_blocks: int, device: torch.device, ops: Ops, team: DeviceTeam
    ) -> None:
        """`shape` is that of whole blocks."""
        first, num = team.first_kv_head, team.num_kv_heads
        self._size = StagingSize.of(shape.bytes_per_block)
        host_bytes = num_host_blocks * shape.bytes_per_block
        memory = team.place.arena_memory(host_bytes + self._size.num_buffers * shape.bytes_per_block)
        self._pinned = _pinned(memory) if device.type == "cuda" else None
        self._staging_memory = memory[host_bytes:]
        # [layers, buffers, …]: as in the staging area of one device, a buffer is one run of bytes
        numbers = self._staging_memory.view(shape.dtype)
        whole = numbers.view(self._size.num_buffers, shape.arena_layers, shape.num_kv_heads, 2, shape.block_size, -1)
        self._staging = whole.transpose(0, 1)[:, :, first : first + num]
        own = replace(shape, num_kv_heads=num).allocate_arena(num_blocks, device)
        host = shape.arena_in(memory[:host_bytes], num_host_blocks)[:, :, first : first + num]
        super().__init__(shape, num_blocks, num_host_blocks, device, ops, own, host)
        self._team = team
        self._on = device
        self._copier: GroupCopier | None = None
        self._pending: list[tuple[SwapTicket, frozenset[int]]] = []
        self._begun: queue.SimpleQueue[tuple[int, SwapTicket | None]] = queue.SimpleQueue()

    def staged_blocks(self, mark: StepMark) -> StagedBlocks:
        """In rank 0, once."""
        copier = self._copier = GroupCopier(ArenaCopier(self._ops, self._device, self._staging, mark), self._team)
        return StagedBlocks(copier, self._staging_memory.numpy().data, self.num_blocks, self._size)

    def swap_out(self, pairs: Pairs) -> SwapTicket | None:
        return self._swap(SWAP_OUT, pairs)

    def swap_in(self, pairs: Pairs) -> SwapTicket | None:
        return self._swap(SWAP_IN, pairs)

    def copy(self, pairs: Pairs) -> None:
        if pairs:
            self._team.order_move(COPY, pairs)
        super().copy(pairs)

    def spoil(self, block_ids: Sequence[int]) -> None:
        if block_ids:
            self._team.order_move(SPOIL, [(block, block) for block in block_ids])
        super().spoil(block_ids)

    def _swap(self, order: int, pairs: Pairs) -> SwapTicket | None:
        if not pairs:
            return None
        number = self._team.order_move(order, pairs)
        own = super().swap_out(pairs) if order == SWAP_OUT else super().swap_in(pairs)
        ticket = GroupTicket(own, self._team, SWAPPED, number)
        return None if ticket.is_done() else ticket

    def close(self) -> None:
        super().close()
        if self._copier is not None:
            self._copier.close()
        elif self._team.place.rank == 0:
            for pipe in self._team.place.pipes:
                os.close(pipe)
        if self._pinned is not None:
            torch.cuda.cudart().cudaHostUnregister(self._pinned)

    def serve(self, decoder: Any, mark: StepMark) -> None:
        """In a rank other than 0: computes and copies what rank 0 orders, until the team is broken."""
        for run in (self._watch_swaps, lambda: self._copy_staged(mark)):
            threading.Thread(target=_run_or_end, args=(run, self._on), name="copies", daemon=True).start()
        self._team.serve(decoder, self.layers, self._move, self._settle_for, mark.note_steps)

    def _move(self, order: int, number: int, pairs: Pairs) -> None:
        """As BlockMover does, which has given the order in rank 0."""
        if order in (SWAP_OUT, SWAP_IN):
            swap = super().swap_out if order == SWAP_OUT else super().swap_in
            ticket = swap(pairs)
            self._begun.put((number, ticket))
            if ticket is not None:
                self._pending.append((ticket, frozenset(pair[order == SWAP_IN] for pair in pairs)))
            return
        self._settle({block for pair in pairs for block in pair})
        if order == COPY:
            super().copy(pairs)
        else:
            super().spoil([block for block, _ in pairs])

    def _settle_for(self, used_blocks: Callable[[], set[int]]) -> None:
        if self._pending:
            self._settle(used_blocks())

    def _settle(self, used: set[int]) -> None:
        """Makes the device wait for the copies of blocks that it is about to use."""
        left = []
        for ticket, blocks in self._pending:
            if not blocks.isdisjoint(used):
                ticket.let_device_wait()
            elif not ticket.is_done():
                left.append((ticket, blocks))
        self._pending = left

    def _watch_swaps(self) -> None:
        """Tells rank 0 which swaps are done."""
        while True:
            number, ticket = self._begun.get()
            if ticket is not None:
                ticket.wait()
            self._team.note_copied(SWAPPED, number)

    def _copy_staged(self, mark: StepMark) -> None:
        """Copies between the device and the staging area, as rank 0 says by the pipe, until that ends."""
        copier = ArenaCopier(self._ops, self._device, self._staging, mark)
        with os.fdopen(self._team.place.pipes[0], "rb", closefd=False) as orders:
            while header := orders.read(HEADER.size):
                into, number, count = HEADER.unpack(header)
                numbers = struct.unpack(f"={2 * count}q", orders.read(16 * count))
                pairs = list(zip(numbers[::2], numbers[1::2], strict=True))
                ticket = copier.copy_in(pairs) if into else copier.copy_out(pairs)
                if ticket is not None:
                    ticket.wait()
                self._team.note_copied(STAGED, number)


def _run_or_end(run: Callable[[], None], device: torch.device) -> None:
    """A rank whose copies fail is of no use: its front sees it end."""
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a thread has GPU 0 otherwise, and would take memory there
        run()
    except Exception as error:
        log.error("copies of blocks have failed, and this rank ends: %s: %s", type(error).__name__, error)
        os._exit(1)


def _pinned(memory: Tensor) -> int:
    """Lets the devices of this process read and write memory on the host by themselves. Its address."""
    failed = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0)
    if int(failed):
        raise RuntimeError(f"CUDA cannot pin {memory.numel()} bytes of the host's memory for blocks: {failed}")
    return memory.data_ptr()
