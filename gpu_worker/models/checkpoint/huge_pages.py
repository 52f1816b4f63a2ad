"""Memory for weights, in huge pages.

A step reads all weights once. With pages of 4 KiB, looking the pages up takes a third of the bandwidth
(docs/decisions/native.md), so this memory lies in huge pages where the system has them.
"""

import mmap
from contextlib import suppress

import torch
from torch import Tensor

PAGE = 2 << 20
SLAB = 64 << 20
LINE = 64  # bytes; every piece begins at a multiple of it


class HugePageAllocator:
    """Hands out pieces of slabs, one after the other. A slab lives as long as any piece of it."""

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        """`size` bytes, all zero."""
        taken = -(-size // LINE) * LINE
        if taken > len(self._rest):
            self._rest = _slab(max(taken, SLAB))
        piece, self._rest = self._rest[:size], self._rest[taken:]
        return piece


def _slab(size: int) -> Tensor:
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -everything.data_ptr() % PAGE
    return everything[skipped : skipped + size]
