"""Memory of blocks that is faulted in before a step comes to write it.

The system gives memory at its first write. That of blocks is in huge pages, and all layers come to their next one in
the same step, which then waits until the system has cleared them all, and on a virtual machine until the host has found
them (1 GB/s).
"""

import threading
from collections.abc import Callable

from torch import Tensor

HUGE_PAGE = 2 << 20


class PagesAhead:
    """Faults in the pages of an arena [layers, blocks, ...] on the host, by a thread of the lowest priority.

    Blocks are first written in order, roughly: of those behind the block that a step writes, as many as fill a huge
    page of a layer, and the rest of the page after that. So memory that nobody comes to is not taken. The thread is no
    daemon: a process that ends while one takes the GIL back ends badly.
    """

    def __init__(self, arena: Tensor, populate: Callable[[Tensor, int, int], None]) -> None:
        """`populate` is the extension's `populate_blocks`, which has a thread of that priority of its own."""
        self._arena = arena
        self._populate = populate
        block_bytes = arena.stride(1) * arena.element_size() if arena.numel() else HUGE_PAGE
        self._step = -(-HUGE_PAGE // block_bytes)  # blocks
        self._end = 0 if arena.numel() else arena.shape[1]  # of the blocks whose memory was asked for
        self._is_idle = threading.Event()
        self._is_idle.set()

    @property
    def is_done(self) -> bool:
        """Whether there is no memory left to ask for."""
        return self._end >= self._arena.shape[1]

    def note(self, block: int) -> None:
        """A step is about to write this block, and maybe some before it."""
        page = block // self._step  # the step itself faults in what is left of this one
        wanted = min((page + 2) * self._step, self._arena.shape[1])
        if wanted <= self._end or not self._is_idle.is_set():
            return
        first, self._end = max((page + 1) * self._step, self._end), wanted
        if first < wanted:
            self._is_idle.clear()
            try:
                threading.Thread(target=self._run, args=(first, wanted), name="pages ahead").start()  # no daemon
            except RuntimeError:  # there are as many threads as may be: steps fault in memory as they come to it
                self._end = self._arena.shape[1]

    def _run(self, first: int, end: int) -> None:
        self._populate(self._arena, first, end)
        self._is_idle.set()
