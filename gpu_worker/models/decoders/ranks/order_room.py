"""The memory, mapped by the ranks of a host, through which rank 0 says what to compute, and tensors with a name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.models.decoders.ranks.place import RankPlace, TeamBroken
from gpu_worker.ops import TokenBatch, native
from gpu_worker.ops.batch import packed

LINE = 64  # bytes


class OrderRoom:
    """How the ranks meet, the order of rank 0, and tensors that all read and write."""

    def __init__(
        self, place: RankPlace, context_tokens: int, columns: Mapping[str, tuple[int, int, torch.dtype]]
    ) -> None:
        """`columns` of a name: rows, columns, and their type."""
        extension: Any = native.load()
        plan_bytes = place.plan_bytes(context_tokens)
        sizes = {name: rows * width * dtype.itemsize for name, (rows, width, dtype) in columns.items()}
        start = extension.TEAM_BYTES + extension.TeamOrder.room_bytes(plan_bytes)
        self._memory = place.team_memory(start + sum(map(_whole_lines, sizes.values())))  # kept: orders lie there
        self.team = place.team(self._memory)
        self.order = extension.TeamOrder(self.team, place.tokens, plan_bytes)
        self.columns: dict[str, Tensor] = {}
        for name, (rows, width, dtype) in columns.items():
            self.columns[name] = self._memory[start : start + sizes[name]].view(dtype).view(rows, width)
            start += _whole_lines(sizes[name])

    def order_forward(self, batch: TokenBatch, rows: Tensor) -> None:
        """Orders a step. On a device the wanted rows are those of the batch."""
        flat, wanted, *others = batch.on_host or (
            *((batch.token_ids, batch.positions, batch.slots), batch.rows),
            *(batch.cu_q, batch.seq_lens, batch.block_tables),
        )
        self.order.order_forward(*flat, wanted if rows is batch.rows else rows, *others)

    def batch(self, device: torch.device) -> TokenBatch:
        """Of an order of a step, on a device."""
        arrays = on_host = [torch.from_numpy(np.asarray(each)) for each in self.order.arrays()]
        if device.type != "cpu":
            arrays = packed(on_host, device)
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

    def used_blocks(self) -> set[int]:
        """Of an order of a step."""
        return set(np.asarray(self.order.arrays()[6]).flatten().tolist())

    def expect(self, whole: bool) -> None:
        """Raises TeamBroken unless a meeting, or what passes between hosts, has come to its end."""
        if not whole:
            raise TeamBroken(self.team.trouble)


def _whole_lines(num_bytes: int) -> int:
    return -(-num_bytes // LINE) * LINE
