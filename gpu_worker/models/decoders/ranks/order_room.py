"""The memory, mapped by ranks with a device each, through which they are told what to do, and say how far they are."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpu_worker.ops import TokenBatch
from gpu_worker.ops.batch import packed

LINE = 64  # bytes
FORWARD, LOGITS, SWAP_OUT, SWAP_IN, COPY, SPOIL, END = range(7)  # what rank 0 wants


class OrderRoom:
    """An order of rank 0, and tensors by name."""

    def __init__(self, memory: Tensor, plan_bytes: int, columns: dict[str, tuple[int, int, torch.dtype]]) -> None:
        """`memory` has `num_bytes` bytes. `columns` of a name: rows, columns, and their type."""
        self._header = memory[:LINE].view(torch.int64)
        self._plan = memory[LINE : LINE + plan_bytes]
        self.columns: dict[str, Tensor] = {}
        start = LINE + whole_lines(plan_bytes)
        for name, (rows, width, dtype) in columns.items():
            size = rows * width * dtype.itemsize
            self.columns[name] = memory[start : start + size].view(dtype).view(rows, width)
            start += whole_lines(size)

    @staticmethod
    def num_bytes(plan_bytes: int, columns: dict[str, tuple[int, int, torch.dtype]]) -> int:
        sizes = (rows * width * dtype.itemsize for rows, width, dtype in columns.values())
        return LINE + whole_lines(plan_bytes) + sum(map(whole_lines, sizes))

    @property
    def order(self) -> int:
        return int(self._header[0])

    @property
    def num_rows(self) -> int:
        """Of LOGITS."""
        return int(self._header[1])

    @property
    def first_row(self) -> int:
        """Of LOGITS, where each rank has the states."""
        return int(self._header[2])

    def order_end(self) -> None:
        self._header[0] = END

    def order_logits(self, num_rows: int, first: int) -> None:
        self._header[:3] = torch.tensor([LOGITS, num_rows, first])

    def order_move(self, order: int, number: int, pairs: Sequence[tuple[int, int]]) -> None:
        """One of the orders that concern blocks. Its `number` is larger than those of earlier ones."""
        self.columns["pairs"][: len(pairs)] = torch.tensor(pairs)
        self._header[:3] = torch.tensor([order, len(pairs), number])

    def move(self) -> tuple[int, list[tuple[int, int]]]:
        """The number of an order that concerns blocks, and the blocks."""
        count, number = self._header[1:3].tolist()
        return number, [(source, target) for source, target in self.columns["pairs"][:count].tolist()]

    def order_forward(self, batch: TokenBatch) -> None:
        sizes = [batch.num_tokens, *batch.block_tables.shape, len(batch.rows)]
        self._header[:5] = torch.tensor([FORWARD, *sizes])
        flat, *others = batch.on_host or (
            *((batch.token_ids, batch.positions, batch.slots), batch.rows),
            *(batch.cu_q, batch.seq_lens, batch.block_tables),
        )
        for place, values in zip(self._arrays(*sizes), (*flat, *others), strict=True):
            place.copy_(values)

    def batch(self, device: torch.device) -> TokenBatch:
        """Of FORWARD, on a device."""
        arrays = on_host = self._arrays(*self._header[1:5].tolist())
        if device.type != "cpu":
            arrays = packed(on_host, device)
        return batch_of(arrays, on_host)

    def used_blocks(self) -> set[int]:
        """Of FORWARD."""
        return set(self._arrays(*self._header[1:5].tolist())[6].flatten().tolist())

    def _arrays(self, num_tokens: int, num_sequences: int, table_width: int, num_rows: int) -> list[Tensor]:
        lengths = [num_tokens] * 3 + [num_rows, num_sequences + 1, num_sequences]
        shapes: list[tuple[int, ...]] = [*((length,) for length in lengths), (num_sequences, table_width)]
        arrays, start = [], 0
        for place, shape in enumerate(shapes):
            dtype = torch.int64 if place < 4 else torch.int32
            size = math.prod(shape) * dtype.itemsize
            arrays.append(self._plan[start : start + size].view(dtype).view(shape))
            start += whole_lines(size)
        return arrays


def batch_of(arrays: Sequence[Tensor], on_host: Sequence[Tensor]) -> TokenBatch:
    """The batch of an order: the same arrays on a device and on the host."""
    token_ids, positions, slots, rows, cu_q, seq_lens, tables = arrays
    return TokenBatch(
        token_ids=token_ids,
        positions=positions,
        slots=slots,
        rows=rows,
        cu_q=cu_q,
        seq_lens=seq_lens,
        block_tables=tables,
        q_lens=on_host[4].diff().tolist(),
        kv_lens=on_host[5].tolist(),
    )


def whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
