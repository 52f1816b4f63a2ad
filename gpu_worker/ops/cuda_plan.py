"""Plans of attention kernels: which thread block does which part of a step, in memory whose address never changes.

A captured CUDA graph fixes addresses and grids, but not what the memory contains. So a plan has room for every batch of
its size from the start, its grid is the number of thread blocks that the device runs at once, and `refill` writes
contents alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ITEM = 8  # int32 numbers per item of a plan
FEW_ROWS = 16  # the most rows that one tile of decode_mma has
FIXED_PIECE = 1024  # keys of each piece, where results may not depend on the batch
PARTS_BYTES = 64 << 20  # for the results of pieces, in a plan whose first batch has no more
EVEN_ENOUGH = 1.15  # of the mean load, for prompts: cutting a tile of many rows costs more than this much idleness


@dataclass(frozen=True, slots=True)
class PlanShape:
    """All that a plan depends on, apart from the lengths of the sequences."""

    dtype: int  # the number of the type in octavo::DType
    kv_type: str
    kv_heads: int
    group: int  # query heads that share a key-value head
    head_dim: int
    window: int
    tensor_cores: bool
    fixed_piece: int = 0  # keys of each piece, whatever the batch holds; 0: pieces that make the load even


@cache
def _kernel(extension: ModuleType, device: int, name: str, shape: PlanShape, rows: int) -> tuple[int, int]:
    """How many rows a tile has, and how many thread blocks run at once."""
    found: tuple[int, int] = extension.attention_kernel(name, shape.dtype, shape.kv_type, shape.head_dim, rows)
    return found


class KernelLaunch:
    """One kernel's share of a batch: sequences with at most `rows` rows, which are queries times heads of a group."""

    def __init__(
        self,
        extension: ModuleType,
        device: torch.device,
        kernel: str,
        shape: PlanShape,
        sizes: tuple[int, int, int],  # at most so many sequences, queries, and rows of one sequence
        most_keys: int,
        lens: tuple[Sequence[int], Sequence[int]],  # queries and keys of the first batch
    ) -> None:
        sequences, queries, rows = sizes
        if shape.fixed_piece:  # then the width of a tile is the same for all batches, too
            rows = max(FEW_ROWS, shape.group)
        self.kernel = kernel
        self.rows, num_slots = _kernel(extension, device.index or 0, kernel, shape, rows)
        self._plan_attention = extension.plan_attention
        self._form = shape.kv_heads, shape.group, self.rows, num_slots
        self._cut = shape.window, shape.fixed_piece
        self._even_enough = 1.0 if kernel == "decode_mma" else EVEN_ENOUGH
        items, partials = extension.plan_capacity(sequences, queries, *self._form, shape.fixed_piece, most_keys)
        starts, first_items, first_partials = self._planned(*lens)
        numbers = self.rows * (shape.head_dim + 2)  # of a piece's results
        if shape.fixed_piece:  # as many pieces as the longest sequences have would take gigabytes
            partials = min(partials, max(first_partials, PARTS_BYTES // (4 * numbers)))
        self._starts = num_slots + 1
        self._numbers = RefillableArray(self._starts + items * ITEM, device)
        self.memory = (
            self._numbers.device[: self._starts],
            self._numbers.device[self._starts :].view(-1, ITEM),
            torch.zeros(partials, dtype=torch.int32, device=device),
            torch.empty(partials * numbers, dtype=torch.float32, device=device),
        )
        self._fill(starts, first_items)

    def refill(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> bool:
        """Whether there was room for all pieces; if not, the plan is the one before."""
        starts, items, partials = self._planned(q_lens, kv_lens)
        if partials > self.memory[2].numel():
            return False
        self._fill(starts, items)
        return True

    def _planned(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> tuple[bytes, bytes, int]:
        found: tuple[bytes, bytes, int] = self._plan_attention(
            q_lens, kv_lens, *self._form, *self._cut, self._even_enough
        )
        return found

    def _fill(self, starts: bytes, items: bytes) -> None:
        if len(items) > self.memory[1].nbytes:
            raise ValueError("q_lens: there are more queries than the plan has room for")
        self._numbers.fill(starts + items)


class AttentionPlan:
    """The kernel launches of a batch. Sequences with few rows go to the kernel that is made for decodes."""

    def __init__(
        self,
        extension: ModuleType,
        device: torch.device,
        shape: PlanShape,
        q_lens: Sequence[int],
        kv_lens: Sequence[int],
        most_keys: int,
        room: int = 0,
    ) -> None:
        """`most_keys`: how many keys the longest sequence will ever have. `room`: how many queries all sequences will
        ever have together; 0: as many as now, each with as many as now, or none."""
        self._group = shape.group
        self._tensor_cores = shape.tensor_cores
        few_lens, many_lens = self._divided(q_lens)
        few, many = [n for n in few_lens if n], [n for n in many_lens if n]
        self._few: KernelLaunch | None = None
        self._many: KernelLaunch | None = None
        if few or (room and shape.tensor_cores):
            most = max(1, FEW_ROWS // shape.group)
            all_few = len(q_lens), min(room, len(q_lens) * most), max(FEW_ROWS, shape.group)
            sizes = all_few if room else (len(few), sum(few), max(few) * shape.group)
            lens = few_lens, kv_lens
            self._few = KernelLaunch(extension, device, "decode_mma", shape, sizes, most_keys, lens)
        if room or many:
            sizes = (len(q_lens), room, room * shape.group) if room else (len(many), sum(many), max(many) * shape.group)
            kernel, lens = "prefill_mma" if shape.tensor_cores else "simt", (many_lens, kv_lens)
            self._many = KernelLaunch(extension, device, kernel, shape, sizes, most_keys, lens)
        self.launches = [launch for launch in (self._few, self._many) if launch is not None]

    def refill(self, q_lens: Sequence[int], kv_lens: Sequence[int]) -> bool:
        """Plans for these lengths; a sequence of 0 keys is left out. The copy to the device is queued, not waited for.

        There are at most as many sequences, with at most as many queries, as the plan was made for, or has room for.
        False where pieces of fixed lengths (PlanShape.fixed_piece) are more than there is room for.
        """
        if self._many is None or self._few is None:
            return all(launch.refill(q_lens, kv_lens) for launch in self.launches)
        few, many = self._divided(q_lens)
        return self._few.refill(few, kv_lens) and self._many.refill(many, kv_lens)

    def _divided(self, q_lens: Sequence[int]) -> tuple[list[int], list[int]]:
        """How many queries each sequence has for the kernel for decodes, and for the other one."""
        few = [n if self._tensor_cores and (n == 1 or 0 < n * self._group <= FEW_ROWS) else 0 for n in q_lens]
        return few, [all_of - of_few for all_of, of_few in zip(q_lens, few, strict=True)]


class RefillableArray:
    """int32 numbers on a device that the host writes again and again. The tensor `device` keeps its address."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=self._cuda)
        self.device: Tensor = torch.zeros(size, dtype=torch.int32, device=device) if self._cuda else self._host
        self._read: Any = torch.cuda.Event() if self._cuda else None

    def fill(self, numbers: bytes) -> None:
        count = len(numbers) // 4
        if self._cuda:
            self._read.synchronize()  # the copy of the step before: long made, unless steps are queued ahead
        self._host[:count] = torch.frombuffer(bytearray(numbers), dtype=torch.int32)
        if self._cuda:
            self.device[:count].copy_(self._host[:count], non_blocking=True)
            self._read.record()
