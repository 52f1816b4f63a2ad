"""The memory in which weights are packed: for good, or until they are written to a file."""

import mmap
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

PAGE = 2 << 20
SLAB = 64 << 20
LINE = 64  # bytes; every piece begins at a multiple of it


class WeightMemory(Protocol):
    def allocate(self, size: int) -> Tensor:
        """`size` bytes."""
        ...


class HugePageAllocator:
    """Hands out pieces of slabs, one after the other. A slab lives as long as any piece of it.

    A step reads all weights once. With pages of 4 KiB, looking the pages up takes a third of the bandwidth
    (docs/decisions/native.md), so this memory lies in huge pages where the system has them.
    """

    def __init__(self) -> None:
        self._rest = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        """`size` bytes, all zero."""
        taken = -(-size // LINE) * LINE
        if taken > len(self._rest):
            self._rest = _slab(max(taken, SLAB))
        piece, self._rest = self._rest[:size], self._rest[taken:]
        return piece


class ScratchMemory:
    """Memory for one matrix at a time: each call hands out what the call before did, and grows it if it must."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def allocate(self, size: int) -> Tensor:
        if size > len(self._memory):
            self._memory = torch.empty(0, dtype=torch.uint8)  # gives the old one back first
            self._memory = _slab(size)
        return self._memory[:size]


def has_huge_pages() -> bool:
    """Whether the system gives huge pages to memory that asks for them."""
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


def _slab(size: int) -> Tensor:
    memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    everything = torch.frombuffer(memory, dtype=torch.uint8)
    skipped = -everything.data_ptr() % PAGE
    return everything[skipped : skipped + size]
