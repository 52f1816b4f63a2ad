"""The blocks a plan moves, in its order. Copies between device and host go on beside steps that do not need them.

Such a copy is waited for by the device, not by the host, before the first step that has to do with one of its blocks.
What is swapped goes in the order it was asked for, so host blocks need no such care.
"""

import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from gpu_worker.ops import SwapTicket
from gpu_worker.running.arena import KvArena
from gpu_worker.scheduling.step import StepPlan
from octavo.ids import BlockId

MEASURE_EVERY = 32  # steps with swaps: one is waited for, and says how long it took


@dataclass(slots=True)
class _PendingSwap:
    swap: SwapTicket
    blocks: frozenset[BlockId]  # on the device


class BlockMover:
    """Not thread-safe."""

    def __init__(self, arena: KvArena) -> None:
        self._arena = arena
        self._pending: list[_PendingSwap] = []
        self._num_swaps = 0

    def move_blocks(self, plan: StepPlan) -> float:
        """Begins what `plan` moves; whatever is queued after may use its blocks. How long its swaps took, where they
        were waited for; else 0."""
        self._pending = [pending for pending in self._pending if not pending.swap.is_done()]
        measured = self._num_swaps % MEASURE_EVERY == 1  # not the first, which sets up what copies need
        if measured and (plan.swap_out or plan.swap_in):
            self.wait_for_copies()  # earlier copies are not this step's
        began = time.perf_counter()
        out = self._keep(self._arena.swap_out(plan.swap_out), [block for block, _ in plan.swap_out])
        self._settle(plan.poison)
        self._arena.poison(plan.poison)
        into = self._keep(self._arena.swap_in(plan.swap_in), [block for _, block in plan.swap_in])
        if out or into:
            self._num_swaps += 1
            if measured:
                self.wait_for_copies()
        else:
            measured = bool(plan.swap_out or plan.swap_in)  # over already
        swapped = time.perf_counter()
        if self._pending:
            self._settle(_used(plan))
        self._arena.copy(plan.copies)
        return swapped - began if measured else 0.0

    def wait_for_copies(self) -> None:
        """Waits for all that is on its way."""
        for pending in self._pending:
            pending.swap.wait()
        self._pending.clear()

    def _keep(self, swap: SwapTicket | None, blocks: Iterable[BlockId]) -> bool:
        """Whether it is under way."""
        if swap is not None:
            self._pending.append(_PendingSwap(swap, frozenset(blocks)))
        return swap is not None

    def _settle(self, used: Collection[BlockId]) -> None:
        """What is queued from now on may use these blocks."""
        left = []
        for pending in self._pending:
            if pending.blocks.isdisjoint(used):
                left.append(pending)
            else:
                pending.swap.let_device_wait()
        self._pending = left


def _used(plan: StepPlan) -> set[BlockId]:
    """The device's blocks that a step has to do with after its swaps."""
    used: set[BlockId] = set()
    for pair in plan.copies:
        used.update(pair)
    for chunk in plan.chunks:
        used.update(chunk.branch.blocks)
    return used
