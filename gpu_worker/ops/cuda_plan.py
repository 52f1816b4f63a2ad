"""Which thread block does which part of a step's attention: memory of fixed addresses that is filled anew each step.

A captured CUDA graph knows addresses and grids, not contents. So a plan has room for every batch of its size from the
start, its grid is the number of thread blocks the device runs at once, and `refill` changes contents alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ITEM = 8  # int32 numbers of an item


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """What a plan of decodes depends on beside the lengths."""

    kernel: str  # decode_mma, decode_simt
    dtype: int  # as octavo::DType counts
    kv_type: str
    kv_heads: int
    group: int  # query heads that share a key-value head
    head_dim: int
    window: int


class DecodePlan:
    """The plan of one query for each of `num_sequences` sequences."""

    def __init__(self, extension: ModuleType, device: torch.device, shape: DecodeShape, num_sequences: int) -> None:
        what = shape.dtype, shape.kv_type, shape.head_dim, shape.group
        rows = extension.attention_rows(shape.kernel, *what)
        self.kernel = shape.kernel
        self._extension = extension
        self._num_sequences = num_sequences
        self._num_heads = shape.kv_heads * -(-shape.group // rows)
        self._num_slots = extension.attention_slots(shape.kernel, *what)
        self._window = shape.window
        items, partials = extension.plan_capacity(num_sequences, 0, self._num_heads, self._num_slots)
        starts = self._num_slots + 1
        self._plan = Filled(starts + items * ITEM, device)
        numbers = self._plan.device
        self.memory = (
            numbers[:starts],
            numbers[starts:].view(-1, ITEM),
            torch.zeros(partials, dtype=torch.int32, device=device),
            torch.empty(partials * rows * (shape.head_dim + 2), dtype=torch.float32, device=device),
        )

    def refill(self, kv_lens: Sequence[int]) -> None:
        """Plans for sequences of these lengths (0: nobody is there); queued on the current stream, not waited for."""
        if len(kv_lens) != self._num_sequences:
            raise ValueError(f"kv_lens: {len(kv_lens)} sequences, the plan has room for exactly {self._num_sequences}")
        packed: tuple[Any, ...] = self._extension.plan_decode(kv_lens, self._num_heads, self._num_slots, self._window)
        self._plan.fill(packed[0] + packed[1])


class Filled:
    """int32 numbers on a device that are written from the host again and again. `device` keeps its address."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=self._cuda)
        self.device: Tensor = torch.zeros(size, dtype=torch.int32, device=device) if self._cuda else self._host
        self._read: Any = torch.cuda.Event() if self._cuda else None

    def fill(self, numbers: bytes) -> None:
        """Queues the copy of `numbers` to the start of `device`."""
        count = len(numbers) // 4
        if self._cuda:
            self._read.synchronize()  # the copy before this one has long been made, except after two steps at once
        self._host[:count] = torch.frombuffer(bytearray(numbers), dtype=torch.int32)
        if self._cuda:
            self.device[:count].copy_(self._host[:count], non_blocking=True)
            self._read.record()
