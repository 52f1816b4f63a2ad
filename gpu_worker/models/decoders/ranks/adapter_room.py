"""Memory, mapped by the ranks of a host, in which rank 0 puts low-rank adapters, so that each lies there once."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor

from gpu_worker.ops.lora import Lora
from octavo.request.errors import TooLarge

LINE = 64  # bytes
MATRICES = 16  # of a layer, at most


class AdapterRoom:
    """In rank 0 any thread may call it. Others only map the memory."""

    def __init__(self, memory: Tensor, extension: Any) -> None:
        self._memory = memory
        self.native = extension.LoraRoom(memory)
        self._taken: list[tuple[int, int]] = [(0, LINE)]  # first and end of each piece, in order: 0 is no place
        self._left: deque[tuple[int, int]] = deque()  # pieces of adapters that are gone
        self._turn = threading.Lock()

    def keep(self, num_bytes: int, num_layers: int, make: Callable[[Callable[[Tensor], Tensor]], Lora]) -> Lora:
        """An adapter in this memory, where all ranks find it. It has so many bytes of matrices, in stacks of layers.

        `make` makes it of matrices which it has had copied here. Raises TooLarge if no gap is large enough."""
        tables = _lines(self.native.table_bytes(num_layers))
        piece = self._take(tables + num_bytes + num_layers * MATRICES * LINE)
        place = piece[0] + tables

        def here(matrix: Tensor) -> Tensor:
            nonlocal place
            copy = self._memory[place : place + matrix.nbytes].view(matrix.dtype).view(matrix.shape)
            place += _lines(matrix.nbytes)
            return copy.copy_(matrix)

        try:
            lora = make(here)
            self.native.put(lora.native, piece[0])
        except BaseException:
            self._left.append(piece)
            raise
        weakref.finalize(lora, self._left.append, piece)
        return lora

    def _take(self, num_bytes: int) -> tuple[int, int]:
        with self._turn:
            while self._left:
                first, end = self._left.popleft()
                self._taken.remove((first, end))
                self.native.drop(first, end - first)
            ends = [end for _, end in self._taken]
            firsts = [first for first, _ in self._taken[1:]] + [len(self._memory)]
            for index, (end, first) in enumerate(zip(ends, firsts, strict=True)):
                if first - end >= num_bytes:
                    piece = (end, end + _lines(num_bytes))
                    self._taken.insert(index + 1, piece)
                    return piece
        raise TooLarge(f"no gap of {num_bytes} bytes is left between adapters: give them more with --adapter-bytes")


def _lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
