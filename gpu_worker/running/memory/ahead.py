"""Memory that is found before a step writes it.

Fresh memory costs a step time when it is first written: the system clears a huge page of each layer, and a virtual
machine may have to ask its host for it, at 1 GB/s. All layers come to their next page in the same step.
"""

import ctypes
import errno
import os
import threading
from contextlib import suppress

from torch import Tensor

HUGE_PAGE = 2 << 20
POPULATE_WRITE = 23  # of Linux's madvise, since 5.14: memory is there as if it had been written, and keeps what it has


class PagesAhead:
    """Has the pages of an arena [layers, blocks, ...] on the host found by a thread of the lowest priority.

    Blocks are first written in order, roughly: where one is, a huge page's worth of those behind it follows in each
    layer. So memory that nobody comes to is not taken.
    """

    def __init__(self, arena: Tensor) -> None:
        self._arena = arena
        self._block_bytes = arena.stride(1) * arena.element_size() if arena.numel() else HUGE_PAGE
        self._step = -(-HUGE_PAGE // self._block_bytes)  # blocks
        self._found = 0  # blocks, from the first on
        self._thread: threading.Thread | None = None

    @property
    def all_found(self) -> bool:
        return self._found >= self._arena.shape[1]

    def note(self, block: int) -> None:
        """A step writes this block, and maybe those before it."""
        wanted = min(block // self._step + 2, -(-self._arena.shape[1] // self._step)) * self._step
        if wanted <= self._found or (self._thread is not None and self._thread.is_alive()):
            return
        first, self._found = self._found, wanted
        self._thread = threading.Thread(target=self._find, args=(first, wanted), name="pages ahead", daemon=True)
        self._thread.start()

    def _find(self, first: int, end: int) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        layers, count = self._arena.shape[:2]
        layer_bytes, page = count * self._block_bytes, os.sysconf("SC_PAGE_SIZE")
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        for layer in range(layers):
            begin = self._arena.data_ptr() + layer * layer_bytes + first * self._block_bytes
            stop = begin + (min(end, count) - first) * self._block_bytes
            begin -= begin % page
            address, length = ctypes.c_void_p(begin), ctypes.c_size_t(stop - begin)
            if madvise(address, length, POPULATE_WRITE) and ctypes.get_errno() == errno.EINVAL:
                return  # an older kernel
