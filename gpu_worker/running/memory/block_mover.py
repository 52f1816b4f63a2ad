"""Moves the blocks that a step names, in the step's order. Copies between device and host run beside later steps.

A step that uses a block of an unfinished copy makes the device wait for that copy; the host does not wait. Swaps run in
the order in which they were begun, so no step has to wait for a host block.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gpu_worker.ops import SwapTicket
from gpu_worker.running.memory.arena import KvArena
from gpu_worker.steps.step_input import StepInput
from octavo.request.ids import BlockId

MEASURE_EVERY = 32  # one step of this many with swaps waits for its copies and measures how long they take


@dataclass(slots=True)
class _PendingSwap:
    swap: SwapTicket
    blocks: frozenset[BlockId]  # device blocks that the copies read or write


class BlockMover:
    """Carries out the block moves of steps on one arena. Not thread-safe."""

    def __init__(self, arena: KvArena) -> None:
        self._arena = arena
        self._pending: list[_PendingSwap] = []
        self._num_swaps = 0

    def move_blocks(self, step: StepInput, used: Iterable[BlockId] = ()) -> float:
        """Begins the moves of `step`, whose chunks use the blocks `used`.

        Work queued on the device after this call may use the blocks.

        Returns how many seconds the swaps took if this call waited for them, else 0.
        """
        self._pending = [pending for pending in self._pending if not pending.swap.is_done()]
        # In every turn it is not the first swap, which sets up the copy engines.
        measured = step.timed or self._num_swaps % MEASURE_EVERY == 1
        if measured and (step.swap_out or step.swap_in):
            self.wait_for_copies()  # so that earlier copies are not measured
        began = time.perf_counter()
        out = self._keep(self._arena.swap_out(step.swap_out), [block for block, _ in step.swap_out])
        self._settle(step.spoil)
        self._arena.spoil(step.spoil)
        into = self._keep(self._arena.swap_in(step.swap_in), [block for _, block in step.swap_in])
        if out or into:
            self._num_swaps += 1
            if measured:
                self.wait_for_copies()
        else:
            measured = bool(step.swap_out or step.swap_in)  # the copies are done already
        swapped = time.perf_counter()
        if self._pending:
            self._settle({block for pair in step.copies for block in pair}.union(used))
        self._arena.copy(step.copies)
        return swapped - began if measured else 0.0

    def demote_blocks(self, step: StepInput) -> float:
        """Begins the demotions of `step`. Returns how many seconds this call waited for them."""
        if not step.demotions:
            return 0.0
        began = time.perf_counter()
        if self._keep(self._arena.swap_out(step.demotions), [block for block, _ in step.demotions]):
            return 0.0
        return time.perf_counter() - began

    def is_copying(self) -> bool:
        self._pending = [pending for pending in self._pending if not pending.swap.is_done()]
        return bool(self._pending)

    def wait_for_copies(self) -> None:
        for pending in self._pending:
            pending.swap.wait()
        self._pending.clear()

    def _keep(self, swap: SwapTicket | None, blocks: Iterable[BlockId]) -> bool:
        """Remembers a swap that is under way. Returns whether it is."""
        if swap is not None:
            self._pending.append(_PendingSwap(swap, frozenset(blocks)))
        return swap is not None

    def _settle(self, used: Collection[BlockId]) -> None:
        """Makes the device wait for the copies of `used`, so that later work may use these blocks."""
        left = []
        for pending in self._pending:
            if pending.blocks.isdisjoint(used):
                left.append(pending)
            else:
                pending.swap.let_device_wait()
        self._pending = left
